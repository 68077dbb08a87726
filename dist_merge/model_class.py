"""Facts that only the model class knows, read without data: defaults, fp32 islands, schema."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ClassFacts:
    """What a model class says; `shapes` is None with `why` where it could not be built."""

    defaults: Mapping[str, Any]
    keep_in_fp32: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]] | None
    why: str = ""


def read_class_facts(module: str, class_name: str, config: Mapping[str, Any]) -> ClassFacts | None:
    """Import a model class and build it on the meta device from `config`.

    Args:
        module: Module to import the class from.
        class_name: Name of the class.
        config: Its config; fields that start with `_` are not passed on.

    Returns:
        None when the class cannot be imported here.

    Ranks: rank 0 only (the import takes seconds). Memory: no tensor data.
    """
    try:
        model_class = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError, RuntimeError):
        return None
    parameters = inspect.signature(model_class.__init__).parameters
    defaults = {
        name: None if parameter.default is inspect.Parameter.empty else parameter.default
        for name, parameter in parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    islands = tuple(getattr(model_class, "_keep_in_fp32_modules", None) or ())
    arguments = {name: value for name, value in config.items() if name in defaults}
    try:
        with torch.device("meta"):
            model = model_class(**arguments)
    except Exception as error:  # a constructor may fail in any way on the meta device
        return ClassFacts(defaults, islands, None, f"{type(error).__name__}: {error}"[:200])
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return ClassFacts(defaults, islands, shapes)
