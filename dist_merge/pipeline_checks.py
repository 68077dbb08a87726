"""Check a base pipeline's `model_index.json` and component folders against its declaration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .base_weights import check_frozen_weights, list_folder
from .contracts import PipelineSpec
from .errors import BaseModelError, make_list
from .files import read_json

MODEL_INDEX = "model_index.json"
# Written by Diffusers into every index; no components and no options.
PRIVATE_KEYS = frozenset({"_class_name", "_diffusers_version", "_name_or_path", "name_or_path"})
LIBRARIES = frozenset({"diffusers", "transformers"})
# The same class under another backend; either may be written for the other.
CLASS_SUFFIXES = ("Fast", "Pil")


def split_index(
    index: Mapping[str, Any], spec: PipelineSpec, *, needs_all: bool
) -> dict[str, tuple[str, str]]:
    """Return an index's present components (name -> library, class), and check its options.

    Raises:
        BaseModelError: A name is unknown, a component is missing, an option has a wrong type.
    """
    components: dict[str, tuple[str, str]] = {}
    for name, value in index.items():
        if name in PRIVATE_KEYS:
            continue
        if name in spec.components:
            if value is None or value == [None, None]:
                continue
            components[name] = parse_entry(name, value)
        elif name in spec.options:
            check_option(name, value, types=spec.options[name])
        else:
            raise make_invalid(
                f"`{name}` is neither a component nor an option of this pipeline",
                expected=make_list([*spec.components, *spec.options], limit=20),
                found=repr(value)[:200],
            )
    missing = set(spec.components) - set(components) - spec.optional
    if missing and needs_all:
        raise BaseModelError(
            "component-missing",
            f"the pipeline needs components that model_index.json does not name: "
            f"{make_list(missing)}",
            where=f"`{MODEL_INDEX}`",
            expected=make_list(set(spec.components) - spec.optional, limit=20),
            hint="complete the base model",
        )
    return components


def parse_entry(name: str, value: Any) -> tuple[str, str]:
    """Parse `[library, class]` (modular indexes add a third part)."""
    if (
        isinstance(value, list)
        and len(value) in (2, 3)
        and isinstance(value[0], str)
        and isinstance(value[1], str)
    ):
        return value[0], value[1]
    raise make_invalid(
        f"component `{name}` is malformed", expected="[library, class]", found=repr(value)[:200]
    )


def check_option(name: str, value: Any, *, types: Sequence[type]) -> None:
    """Check the type of an option; a bool is no number, an int is a float."""
    fits = (
        bool in types
        if isinstance(value, bool)
        else isinstance(value, tuple(types)) or (isinstance(value, int) and float in types)
    )
    if not fits:
        raise make_invalid(
            f"option `{name}` has a wrong type",
            expected=" or ".join("null" if t is type(None) else t.__name__ for t in types),
            found=repr(value)[:200],
        )


def check_components(
    base_dir: Path,
    *,
    components: Mapping[str, tuple[str, str]],
    spec: PipelineSpec,
    paths: Sequence[str],
    trained: str,
) -> None:
    """Check classes, libraries and folders of all components; `trained` is checked elsewhere.

    Raises:
        BaseModelError: A class is not the declared one, or a folder is missing or incomplete.
    """
    for name, (library, class_name) in sorted(components.items()):
        check_class(name, library=library, class_name=class_name, spec=spec, paths=paths)
        names = list_folder(paths, name)
        if not names:
            raise make_folder_error(name, f"it has no file, but should hold a `{class_name}`")
        if name != trained:
            check_folder(base_dir, folder=name, class_name=class_name, names=names, paths=paths)


def check_class(
    name: str, *, library: str, class_name: str, spec: PipelineSpec, paths: Sequence[str]
) -> None:
    """Check one component's library and class against the declaration."""
    patterns = spec.components[name]
    if not any(is_same_class(class_name, pattern) for pattern in patterns):
        raise BaseModelError(
            "class-mismatch",
            f"component `{name}` is of another class than the pipeline declares",
            where=f"`{MODEL_INDEX}`",
            expected=" or ".join(patterns),
            found=class_name,
        )
    known = LIBRARIES | spec.libraries
    if library not in known and f"{name}/{library}.py" not in paths:
        raise make_invalid(
            f"component `{name}` is from an unknown library",
            expected=make_list(known) + f", or a file `{name}/{library}.py`",
            found=library,
        )


def is_same_class(class_name: str, pattern: str) -> bool:
    """Tell whether a class is the declared one or its Fast or Pil variant."""
    for suffix in CLASS_SUFFIXES:
        class_name = class_name.removesuffix(suffix)
        pattern = pattern.removesuffix(suffix)
    return fnmatchcase(class_name, pattern)


def check_folder(
    base_dir: Path, *, folder: str, class_name: str, names: Sequence[str], paths: Sequence[str]
) -> None:
    """Check that a frozen component's folder holds what its kind of class loads."""
    if class_name.endswith("Scheduler"):
        needed = ["scheduler_config.json"]
    elif class_name.endswith("Guidance"):
        needed = ["guider_config.json"]
    elif "Tokenizer" in class_name:
        needed = ["tokenizer_config.json", "tokenizer.json", "vocab.json", "spiece.model"]
    elif any(word in class_name for word in ("Processor", "FeatureExtractor")):
        needed = ["preprocessor_config.json", "processor_config.json", "tokenizer_config.json"]
    else:
        needed = ["config.json"]
        if "config.json" in names:
            check_frozen_weights(base_dir, folder=folder, paths=paths)
    found = [name for name in needed if name in names]
    if not found:
        raise make_folder_error(folder, f"it has none of {make_list(needed)}")
    if not isinstance(read_json(base_dir / folder / found[0], kind=BaseModelError), dict) and (
        found[0].endswith("config.json")
    ):
        raise make_folder_error(folder, f"`{found[0]}` is no JSON object")


def make_folder_error(folder: str, found: str) -> BaseModelError:
    """Make the error for a component folder that is missing or incomplete."""
    return BaseModelError(
        "component-missing",
        f"the folder of component `{folder}` is missing or incomplete",
        where=f"`{folder}`",
        found=found,
        hint="download the whole base model",
    )


def make_invalid(what: str, *, expected: str, found: str) -> BaseModelError:
    """Make the error for an index that breaks its declaration."""
    return BaseModelError(
        "pipeline-invalid", what, where=f"`{MODEL_INDEX}`", expected=expected, found=found
    )
