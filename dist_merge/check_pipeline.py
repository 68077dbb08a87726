"""Check a base pipeline's components against its index before anything moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .contracts import Architecture, PipelineSpec
from .errors import ArtifactError, BaseModelError, make_list
from .files import read_json
from .safetensors_header import read_header

# A folder of one of these kinds needs the file; everything else is a model with a config.
NEEDED_FILES = {
    "scheduler": ("scheduler_config.json",),
    "tokenizer": ("tokenizer_config.json",),
    "processor": ("preprocessor_config.json", "processor_config.json"),
    "feature_extractor": ("preprocessor_config.json",),
    "guider": ("guider_config.json",),
}


def check_pipeline(
    base_dir: Path,
    index: Mapping[str, Any],
    *,
    names: Sequence[str],
    component: str,
    architecture: Architecture,
) -> None:
    """Check classes, components, options and folders of a pipeline.

    Raises:
        BaseModelError: With the first thing that is wrong.
    """
    pipeline_class = str(index.get("_class_name"))
    spec = architecture.pipelines.get(pipeline_class)
    if spec is None:
        raise BaseModelError(
            "class-mismatch",
            f"{pipeline_class} is no pipeline of {architecture.transformer_class}",
            where="`model_index.json`",
            expected=", ".join(sorted(architecture.pipelines)),
        )
    entries = {name: value for name, value in index.items() if not name.startswith("_")}
    for name, value in entries.items():
        check_entry(name, value, spec=spec)
    missing = [
        name
        for name in spec.components
        if name not in spec.optional and not is_present(entries.get(name))
    ]
    if missing or not is_present(entries.get(component)):
        raise BaseModelError(
            "component-missing",
            f"the base pipeline lacks {make_list(missing or [component])}",
            where="`model_index.json`",
            hint="pass a complete pipeline; choose the trained component with --component",
        )
    for name, value in entries.items():
        if is_present(value) and name in spec.components:
            check_folder(base_dir, name, names=names)


def is_present(value: Any) -> bool:
    """Whether an index entry names a component."""
    return isinstance(value, list) and len(value) >= 2 and value[1] is not None


def check_entry(name: str, value: Any, *, spec: PipelineSpec) -> None:
    """Check one entry of the index: a declared component or option of the right kind."""
    if name in spec.components:
        if value == [None, None] and name in spec.optional:
            return
        if not is_present(value) or not all(isinstance(part, str) for part in value[:2]):
            raise BaseModelError(
                "component-missing",
                f"component `{name}` is declared but absent",
                where="`model_index.json`",
                found=repr(value),
            )
        if value[1] not in spec.components[name]:
            raise BaseModelError(
                "class-mismatch",
                f"component `{name}` is of a class this pipeline does not take",
                where="`model_index.json`",
                expected=" or ".join(spec.components[name]),
                found=value[1],
            )
    elif name in spec.options:
        if not isinstance(value, spec.options[name]):
            raise BaseModelError(
                "pipeline-invalid",
                f"option `{name}` has a value of the wrong type",
                where="`model_index.json`",
                found=repr(value),
            )
    else:
        raise BaseModelError(
            "pipeline-invalid",
            f"the pipeline has no component or option `{name}`",
            where="`model_index.json`",
            expected=", ".join(sorted([*spec.components, *spec.options])),
        )


def check_folder(base_dir: Path, name: str, *, names: Sequence[str]) -> None:
    """Check that a component's folder is complete."""
    inside = {path[len(name) + 1 :] for path in names if path.startswith(f"{name}/")}
    kind = next((kind for kind in NEEDED_FILES if name.startswith(kind)), None)
    needed = NEEDED_FILES[kind] if kind else ("config.json",)
    if not inside & set(needed):
        raise BaseModelError(
            "component-missing",
            f"the folder of component `{name}` is incomplete",
            where=f"`{name}/`",
            expected=" or ".join(needed),
            hint="the download is incomplete; fetch the base again",
        )
    weights = [path for path in inside if path.endswith((".safetensors", ".bin"))]
    if kind is None and not weights:
        raise BaseModelError(
            "component-missing", f"component `{name}` has no weights", where=f"`{name}/`"
        )
    for path in sorted(p for p in inside if ".index." in p and p.endswith(".json")):
        check_index(base_dir / name, path, files=inside)


def check_index(folder: Path, path: str, *, files: set[str]) -> None:
    """Check that every entry of an index lies in the file it names."""
    data = read_json(folder / path, kind=BaseModelError)
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict):
        raise index_error(folder, path, "it has no weight_map")
    by_file: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        by_file.setdefault(str(file), set()).add(tensor)
    for file, tensors in sorted(by_file.items()):
        if file not in files:
            raise index_error(folder, path, f"`{file}` does not exist")
        if file.endswith(".safetensors"):
            try:
                absent = tensors - set(read_header(folder / file).tensors)
            except ArtifactError as error:
                raise index_error(folder, path, f"`{file}`: {error.found}") from error
            if absent:
                raise index_error(folder, path, f"{make_list(absent)} not in `{file}`")


def index_error(folder: Path, path: str, found: str) -> BaseModelError:
    """The error for an index that does not match its files."""
    return BaseModelError(
        "index-mismatch",
        "an index of the base model does not match its weight files",
        where=f"`{folder.name}/{path}`",
        found=found,
        hint="the download is incomplete or mixed; fetch the base again",
    )
