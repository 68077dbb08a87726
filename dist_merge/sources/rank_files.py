"""One `model_world_size_W_rank_R.pt` per training rank, as verl and others save FSDP actors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import SourceError, make_list
from ..records import DTYPES, LocalShard, SourceFile
from .geometry import Placement, shard_box
from .keys import clean_key
from .unpickle import load_rank_file

NAME = re.compile(r"model_world_size_([1-9]\d*)_rank_(0|[1-9]\d*)\.pt")


class RankFileSource:
    """A folder of rank files."""

    backend = "fsdp"

    def find_files(self, local_dir: Path) -> list[SourceFile]:
        """See `contracts.Source`."""
        found = []
        for name in sorted(os.listdir(local_dir)):
            if NAME.fullmatch(name) and (local_dir / name).is_file():
                stat = (local_dir / name).stat()
                found.append(SourceFile(name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
        if not found:
            inside = [p.parent.name for p in local_dir.glob("*/model_world_size_*_rank_*.pt")]
            raise SourceError(
                "no-rank-files",
                "the folder holds no model_world_size_W_rank_R.pt",
                where=f"`{local_dir}`",
                found=f"such files in {make_list(inside)}" if inside else None,
                hint="pass that folder as --local_dir"
                if inside
                else "pass the folder the trainer wrote its rank files to, often `actor`",
            )
        return found

    def check_complete(self, names: Sequence[str]) -> int:
        """See `contracts.Source`."""
        matches = [match for name in names if (match := NAME.fullmatch(name))]
        sizes = {int(match.group(1)) for match in matches}
        if len(sizes) != 1:
            raise SourceError(
                "mixed-world-sizes",
                "the folder mixes rank files of several runs",
                expected="one world size",
                found=f"world sizes {', '.join(map(str, sorted(sizes)))}",
                hint="move the files of the other run away",
            )
        (world_size,) = sizes
        ranks = {int(match.group(2)) for match in matches}
        missing = sorted(set(range(world_size)) - ranks)
        if missing:
            raise SourceError(
                "rank-files-missing",
                f"{len(missing)} of {world_size} rank files are missing",
                expected=f"ranks 0-{world_size - 1}",
                found=f"no file for rank {format_ranges(missing)}",
                hint="copy the missing files into the folder, or use another checkpoint",
            )
        extra = sorted(ranks - set(range(world_size)))
        if extra:
            raise SourceError(
                "rank-files-extra",
                f"rank files beyond world size {world_size}: rank {format_ranges(extra)}",
                hint="the files were renamed or mixed up",
            )
        return world_size

    def open(self, local_dir: Path, files: Sequence[SourceFile]) -> RankFileReader:
        """See `contracts.Source`."""
        others = [
            name
            for name in sorted(os.listdir(local_dir))
            if name.endswith(".pt") and not NAME.fullmatch(name)
        ]
        notes = [f"ignored files that are no model weights: {make_list(others)}"] if others else []
        opened = {file.path: load_rank_file(local_dir / file.path) for file in files}
        return RankFileReader(opened, notes)


class RankFileReader:
    """Opened rank files: path -> state dict."""

    def __init__(self, opened: dict[str, dict[str, Any]], notes: list[str]) -> None:
        self._opened = opened
        self._notes = notes

    def describe(self, holder: int) -> list[LocalShard]:
        """See `contracts.SourceReader`."""
        shards = []
        for file, state in self._opened.items():
            cleaned: dict[str, str] = {}
            for key, value in state.items():
                fqn = clean_key(key)
                if fqn in cleaned:
                    raise SourceError(
                        "key-collision",
                        f"two tensors have the name `{fqn}` once wrappers are removed",
                        where=f"`{file}`",
                        found=f"`{cleaned[fqn]}` and `{key}`",
                    )
                cleaned[fqn] = key
                shards.append(describe_value(fqn, key, value, file=file, holder=holder))
            if any(fqn != key for fqn, key in cleaned.items()):
                self._notes.append("removed wrapper names from tensor names")
        return shards

    def read(self, source_file: str, source_key: str) -> torch.Tensor:
        """See `contracts.SourceReader`."""
        return local_tensor(self._opened[source_file][source_key])

    def notes(self) -> list[str]:
        """See `contracts.SourceReader`."""
        return list(self._notes)

    def close(self) -> None:
        """See `contracts.SourceReader`."""
        self._opened = {}


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """The piece of a DTensor, or the plain tensor itself, detached from autograd."""
    piece: torch.Tensor = getattr(value, "_local_tensor", value)
    return piece.detach()


def describe_value(fqn: str, key: str, value: Any, *, file: str, holder: int) -> LocalShard:
    """Describe one value of a rank file as a box.

    Raises:
        SourceError: No tensor, an unsupported layout, or a piece that does not fit its claim.
    """
    if not isinstance(value, torch.Tensor):
        raise SourceError(
            "not-a-state-dict",
            f"`{key}` is no tensor",
            where=f"`{file}`",
            found=type(value).__name__,
        )
    piece = local_tensor(value)
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPES or piece.layout is not torch.strided:
        raise SourceError(
            "dtype-unknown",
            f"tensor `{fqn}` cannot be stored in safetensors",
            where=f"`{file}`",
            found=f"{dtype}, {piece.layout}",
        )
    shape = tuple(value.shape)
    is_plain = not hasattr(value, "_local_tensor")
    if is_plain:
        offsets, sizes = (0,) * len(shape), shape
    else:
        offsets, sizes = locate_piece(fqn, value, file=file)
    if tuple(piece.shape) != sizes or piece.dtype != value.dtype:
        raise SourceError(
            "local-shard-size",
            f"tensor `{fqn}`: a local shard is not as large as its placement says",
            where=f"`{file}`",
            expected=str(list(sizes)),
            found=str(list(piece.shape)),
            hint="the file is damaged or was edited",
        )
    return LocalShard(fqn, shape, dtype, offsets, sizes, holder, file, key, is_plain)


def locate_piece(fqn: str, value: Any, *, file: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of a DTensor's piece; nothing here may talk to a process group."""
    spec = value._spec
    mesh = spec.mesh.__dict__
    try:
        mesh_shape = read_mesh_shape(mesh)
        coordinate = tuple(int(c) for c in mesh["_coordinate_on_dim"])
    except (KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            "mesh-invalid",
            f"tensor `{fqn}`: its mesh cannot be read",
            where=f"`{file}`",
            found=f"{type(error).__name__}: {error}",
            hint="it was written by a torch release this version does not know",
        ) from error
    match = NAME.fullmatch(file)
    rank = mesh.get("_rank")
    if match and rank is not None and int(rank) != int(match.group(2)):
        raise SourceError(
            "rank-mismatch",
            "a rank file was renamed: its content was saved by another rank",
            where=f"`{file}`",
            expected=f"rank {match.group(2)}",
            found=f"rank {rank}",
            hint="give the files back their names",
        )
    order = {
        entry.tensor_dim: tuple(entry.mesh_dims)
        for entry in getattr(spec, "shard_order", None) or ()
    }
    try:
        return shard_box(
            tuple(value.shape),
            mesh_shape=mesh_shape,
            coordinate=coordinate,
            placements=[read_placement(p) for p in spec.placements],
            shard_order=order,
        )
    except SourceError as error:
        error.where = f"tensor `{fqn}`, `{file}`"
        raise


def read_mesh_shape(mesh: Mapping[str, Any]) -> tuple[int, ...]:
    """Mesh shape from a mesh's instance dictionary, as torch 2.4 to 2.14 write it."""
    if "mesh" in mesh:
        return tuple(mesh["mesh"].shape)
    layout = mesh["_layout"]
    if hasattr(layout, "axes"):
        return tuple(int(torch.Size(_as_tuple(axis.shape)).numel()) for axis in layout.axes)
    return tuple(int(torch.Size(_as_tuple(size)).numel()) for size in _as_tuple(layout.shape))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def read_placement(placement: Any) -> Placement:
    """Turn a torch placement into ours.

    Raises:
        SourceError: Partial sums, or a class this version does not know.
    """
    name = type(placement).__name__
    if name == "Shard":
        return Placement(dim=int(placement.dim))
    if name == "_StridedShard":
        return Placement(dim=int(placement.dim), split_factor=int(placement.split_factor))
    if name == "Replicate":
        return Placement()
    if name in ("Partial", "_Partial", "MaskPartial", "_MaskPartial"):
        raise SourceError(
            "placement-partial",
            "a tensor is saved as partial sums, which are no weights",
            found=repr(placement),
            hint="reduce the tensor before saving, then merge again",
        )
    raise SourceError("placement-unknown", f"unknown placement {name}", found=repr(placement))


def format_ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as ranges: `1, 3-5`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
