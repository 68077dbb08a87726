"""What a model class knows and files do not: defaults, fp32 islands, its own state dict."""

from __future__ import annotations

import importlib
import inspect
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from .contracts import Architecture
from .errors import BaseModelError

# Far more than any of these models has; building as many takes seconds.
MAX_MODULES = 20_000


@dataclass(frozen=True)
class ClassFacts:
    """Facts of one class for one config.

    `defaults` are constructor defaults as JSON-ready data; `shapes` the state dict of an instance
    built without data; `unused_fields` the config's fields that the constructor does not have;
    `ignored_tensors` patterns of file tensors that the class skips when it loads.
    """

    defaults: Mapping[str, Any]
    keep_in_fp32: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    unused_fields: tuple[str, ...]
    ignored_tensors: tuple[str, ...]

    def is_ignored(self, name: str) -> bool:
        """Tell whether the class skips a tensor of this name that it does not know."""
        return name not in self.shapes and any(re.search(p, name) for p in self.ignored_tensors)


def import_model_class(module: str, class_name: str) -> type | None:
    """Import one class from its own module; None where it is not installed here.

    Only installed packages are imported, never files of a base model.
    """
    if not module:
        return None
    try:
        found = getattr(importlib.import_module(module), class_name, None)
    except Exception:
        # Optional packages fail to import in many ways; the manifest says the check did not run.
        return None
    return found if isinstance(found, type) else None


def read_class_facts(architecture: Architecture, config: Mapping[str, Any]) -> ClassFacts | None:
    """Build the trained class from its `config` without data; None where it is not installed.

    Raises:
        BaseModelError: The class refuses the config.

    Memory: no tensor data; no random number is drawn, the default dtype stays.
    """
    cls = import_model_class(architecture.module, architecture.trained_class)
    if cls is None:
        return None
    defaults = read_defaults(cls)
    fields = {name: value for name, value in config.items() if not name.startswith("_")}
    # Published configs carry fields that later versions dropped; Diffusers ignores them as well.
    unused = tuple(sorted(name for name in fields if name not in defaults))
    arguments = {name: value for name, value in fields.items() if name in defaults}
    try:
        # On the meta device nothing is drawn. Saving and restoring the random state around this
        # would set a trainer's back that goes on meanwhile.
        with torch.device("meta"), limit_modules():
            model = cls(**arguments)
        state = model.state_dict()
    except Exception as error:
        raise BaseModelError(
            "base-class-unbuildable",
            f"class `{cls.__name__}` cannot be built from the base's config.json",
            found=f"{type(error).__name__}: {str(error).strip()[:300]}",
            hint="does the installed version of the library fit the base model?",
        ) from error
    return ClassFacts(
        defaults=defaults,
        keep_in_fp32=tuple(getattr(cls, "_keep_in_fp32_modules", None) or ()),
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        unused_fields=unused,
        ignored_tensors=tuple(getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()),
    )


@contextmanager
def limit_modules() -> Iterator[None]:
    """Stop the building of a model that a damaged or hostile config makes endless."""
    builder, count = threading.get_ident(), 0

    def see(*_: Any) -> None:
        nonlocal count
        # The hook is the process's; a trainer may build modules meanwhile.
        if threading.get_ident() == builder:
            count += 1
            if count > MAX_MODULES:
                raise ValueError(f"more than {MAX_MODULES} modules")

    handle = register_module_module_registration_hook(see)
    try:
        yield
    finally:
        handle.remove()


def read_defaults(cls: type) -> dict[str, Any]:
    """Constructor arguments and their defaults, tuples as lists; None where there is none."""
    parameters = list(inspect.signature(cls).parameters.values())
    return {
        p.name: None if p.default is p.empty else _plain(p.default)
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
