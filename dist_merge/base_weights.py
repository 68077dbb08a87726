"""Weight files of one component folder: which there are, and what their headers say."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import BaseModelError, make_list
from .files import is_safe_path, read_json
from .records import TensorSpec
from .safetensors_header import read_header

WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf"}
)
_INDEX_NAME = re.compile(r"\.index(\.[^./]+)?\.json$")
_DEFAULT_INDEX_NAME = re.compile(r"\.safetensors\.index\.json$")


@dataclass(frozen=True)
class ComponentWeights:
    """Tensors of a component: name -> spec, name -> file (relative to the base)."""

    stem: str
    tensors: Mapping[str, TensorSpec]
    files: Mapping[str, str]


def is_index_file(path: str) -> bool:
    """Tell whether a file name is that of a weight index, of any variant."""
    return _INDEX_NAME.search(PurePosixPath(path).name) is not None


def is_weight_like(path: str) -> bool:
    """Tell whether a file holds weights or is the index of such files, of any variant."""
    return PurePosixPath(path).suffix.lower() in WEIGHT_SUFFIXES or is_index_file(path)


def join(folder: str, name: str) -> str:
    """Relative path of `name` in `folder`; `.` is the base itself."""
    return name if folder == "." else f"{folder}/{name}"


def list_folder(paths: Iterable[str], folder: str) -> list[str]:
    """Names of the files that lie directly in `folder`."""
    prefix = "" if folder == "." else f"{folder}/"
    names = (path[len(prefix) :] for path in paths if path.startswith(prefix))
    return [name for name in names if "/" not in name]


def read_component_weights(
    base_dir: Path, *, folder: str, paths: Sequence[str], stems: Sequence[str]
) -> ComponentWeights:
    """Read the headers of a component's default safetensors files (one file, or index + files).

    Raises:
        BaseModelError: There are none, more than one set, or index and headers disagree.
        ArtifactError: A file is damaged.
    """
    names = set(list_folder(paths, folder))
    singles = [f"{stem}.safetensors" for stem in stems if f"{stem}.safetensors" in names]
    indexes = [f"{s}.safetensors.index.json" for s in stems]
    indexes = [name for name in indexes if name in names]
    if len(singles) + len(indexes) > 1:
        raise BaseModelError(
            "base-weights-ambiguous",
            "a component folder holds more than one set of default weights",
            where=f"`{folder}`",
            found=make_list(singles + indexes),
            hint="remove the set that is not used",
        )
    if not singles and not indexes:
        raise make_missing_error(folder, names=names, stems=stems)
    chosen = (singles + indexes)[0]
    stem = chosen.split(".safetensors")[0]
    if singles:
        header = read_header(base_dir / join(folder, chosen))
        files = dict.fromkeys(header.tensors, join(folder, chosen))
        specs = {name: entry.spec for name, entry in header.tensors.items()}
        return ComponentWeights(stem, specs, files)
    weight_map = read_weight_map(base_dir, join(folder, chosen))
    specs = check_index(base_dir, folder=folder, index=chosen, weight_map=weight_map, exact=True)
    return ComponentWeights(stem, specs, {n: join(folder, f) for n, f in weight_map.items()})


def read_small_tensor(base_dir: Path, *, weights: ComponentWeights, name: str) -> list[float]:
    """Read the values of one small float32 tensor, [length].

    Raises:
        BaseModelError: It is absent, large, or of another kind.
    """
    spec = weights.tensors.get(name)
    if spec is None or spec.dtype != "float32" or len(spec.shape) != 1 or spec.nbytes > 2**16:
        raise BaseModelError(
            "base-class-mismatch",
            f"the base has no usable tensor `{name}`",
            expected="a short row of float32 numbers",
            found="no such tensor" if spec is None else f"{list(spec.shape)} {spec.dtype}",
        )
    path = base_dir / weights.files[name]
    header = read_header(path)
    with path.open("rb") as file:
        file.seek(header.nbytes + header.tensors[name].begin)
        raw = file.read(spec.nbytes)
    return list(struct.unpack(f"<{spec.shape[0]}f", raw))


def make_missing_error(folder: str, *, names: set[str], stems: Sequence[str]) -> BaseModelError:
    """Say that a folder has no default safetensors weights, and what it has instead."""
    weights = [name for name in names if is_weight_like(name)]
    return BaseModelError(
        "base-weights-missing",
        "a component folder has no default safetensors weights",
        where=f"`{folder}`",
        expected=" or ".join(f"`{s}.safetensors` (or its index)" for s in stems),
        found=make_list(weights) if weights else "no weight file",
        hint="download the default weights; variants (fp16, bf16) and .bin files are not read",
    )


def read_weight_map(base_dir: Path, index: str) -> dict[str, str]:
    """Read and check the `weight_map` of an index file.

    Raises:
        BaseModelError: The index has no such map, or it names files outside its folder.
    """
    data = read_json(base_dir / index, kind=BaseModelError)
    weight_map: Any = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise make_index_error(index, "it has no `weight_map`")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_safe_path(file) or "/" in file:
            raise make_index_error(index, f"tensor `{name}` lies in {file!r}")
    return weight_map


def check_index(
    base_dir: Path, *, folder: str, index: str, weight_map: Mapping[str, str], exact: bool
) -> dict[str, TensorSpec]:
    """Check every entry of an index against the headers; returns the tensors' specs.

    With `exact` the files must hold nothing else.

    Raises:
        BaseModelError: A file or tensor is missing, or (`exact`) lies elsewhere than it says.
    """
    where = join(folder, index)
    specs: dict[str, TensorSpec] = {}
    for file in sorted(set(weight_map.values())):
        path = base_dir / join(folder, file)
        if not path.is_file():
            raise make_index_error(where, f"file `{file}` is missing")
        if path.suffix != ".safetensors":
            continue
        tensors = read_header(path).tensors
        listed = {name for name, holder in weight_map.items() if holder == file}
        if listed - set(tensors):
            raise make_index_error(where, f"`{file}` has not {make_list(listed - set(tensors))}")
        if exact and set(tensors) - listed:
            extra = make_list(set(tensors) - listed)
            raise make_index_error(where, f"`{file}` also holds {extra}")
        specs.update((name, tensors[name].spec) for name in listed)
    return specs


def check_frozen_weights(base_dir: Path, *, folder: str, paths: Sequence[str]) -> None:
    """Check the weights of a component that is copied: present, and whole where that shows.

    Raises:
        BaseModelError: No weights, or an index that does not fit its files.
        ArtifactError: A safetensors file is damaged.
    """
    inside = [path for path in paths if path.startswith(f"{folder}/")]
    if not any(is_weight_like(path) and not is_index_file(path) for path in inside):
        raise make_missing_error(folder, names=set(), stems=("model", "diffusion_pytorch_model"))
    for path in inside:
        if path.endswith(".safetensors"):
            read_header(base_dir / path)
        elif is_index_file(path):
            weight_map = read_weight_map(base_dir, path)
            parent = PurePosixPath(path).parent.as_posix()
            # A download may leave out the files of a variant but not its small index.
            present = any(join(parent, file) in paths for file in set(weight_map.values()))
            if present or _DEFAULT_INDEX_NAME.search(path):
                check_index(
                    base_dir,
                    folder=parent,
                    index=PurePosixPath(path).name,
                    weight_map=weight_map,
                    exact=False,
                )


def make_index_error(index: str, found: str) -> BaseModelError:
    """Make the error for an index that does not fit its files."""
    return BaseModelError(
        "index-mismatch",
        "a weight index does not fit its files",
        where=f"`{index}`",
        found=found,
        hint="the download is incomplete or mixed from two versions; fetch the base again",
    )
