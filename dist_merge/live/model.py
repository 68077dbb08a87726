"""From what a trainer holds to a sharded state dict, a config, and the adapters' settings.

Nothing of the model is changed: no wrapper is removed from it, no tensor is copied or moved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import RequestError, SourceError


@dataclass(frozen=True)
class LiveModel:
    """What a publish needs of a model.

    `state` maps state-dict keys to DTensors, ShardedTensors or plain tensors; `config` is the
    model's own config with `_class_name`; `adapters` maps adapter names to PEFT configs.
    """

    state: Mapping[str, Any]
    config: Mapping[str, Any]
    adapters: Mapping[str, Mapping[str, Any]]


def read_live_model(
    model: Any,
    *,
    model_config: Mapping[str, Any] | None,
    adapter_configs: Mapping[str, Any] | None,
) -> LiveModel:
    """Read a module under any wrapper, or a state dict.

    Args:
        model: FSDP2, FSDP1, DDP, compiled, accelerate-prepared, PEFT or plain module; or a state
            dict.
        model_config: Config of the model; needed with a state dict, else the module's own.
        adapter_configs: Adapter name -> PEFT LoraConfig; with a module its own are taken.

    Raises:
        RequestError: It is neither, or a state dict without a config.

    Ranks: collective for FSDP1, whose flat parameters are cut into pieces here.
    """
    configs = {name: plain_config(value) for name, value in (adapter_configs or {}).items()}
    if isinstance(model, Mapping):
        if model_config is None:
            raise RequestError(
                "missing-option",
                "a state dict says nothing of its model's configuration",
                hint="pass model_config=, the config the model was built from, with `_class_name`",
            )
        return LiveModel(dict(model), plain_json(model_config), configs)
    if not isinstance(model, nn.Module):
        raise RequestError(
            "bad-option",
            f"`model` is a {type(model).__name__}",
            expected="a module or a state dict",
        )
    inner = unwrap(model)
    config = model_config if model_config is not None else getattr(inner, "config", None)
    if config is None:
        raise RequestError(
            "missing-option",
            f"`{type(inner).__name__}` has no config",
            hint="pass model_config=, the config the model was built from",
        )
    named = {"_class_name": class_name(inner), **plain_json(config)}
    own = getattr(model_with_adapters(model), "peft_config", None) or {}
    configs = {**{name: plain_config(value) for name, value in own.items()}, **configs}
    return LiveModel(read_state(model), named, configs)


def read_state(model: nn.Module) -> dict[str, Any]:
    """The module's sharded state dict; values are views of the parameters."""
    if has_fsdp1(model):
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(model))
    return dict(model.state_dict())


def has_fsdp1(model: nn.Module) -> bool:
    """Tell whether any module in the tree is wrapped by the FSDP1 class."""
    return any(
        type(module).__name__ == "FullyShardedDataParallel"
        and type(module).__module__.startswith("torch.distributed.fsdp")
        for module in model.modules()
    )


def unwrap(model: Any) -> Any:
    """The model itself below DDP, FSDP1, torch.compile and PEFT."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            model = model.get_base_model()
        elif isinstance(getattr(model, "module", None), nn.Module) and is_wrapper(model):
            model = model.module
        else:
            return model


def model_with_adapters(model: Any) -> Any:
    """The outermost module that knows its adapters' configs; the model itself when none does."""
    while True:
        if getattr(model, "peft_config", None):
            return model
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(getattr(model, "module", None), nn.Module) and is_wrapper(model):
            model = model.module
        else:
            return model


def is_wrapper(model: nn.Module) -> bool:
    """Tell whether a module only wraps its `module` for parallel training."""
    return type(model).__name__ in (
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "DataParallel",
    )


def class_name(model: nn.Module) -> str:
    """Name of the class before `fully_shard` put its own in front."""
    from torch.distributed.fsdp import FSDPModule

    name = type(model).__name__
    return name.removeprefix("FSDP") if isinstance(model, FSDPModule) else name


def plain_json(config: Any) -> dict[str, Any]:
    """A config as JSON-ready data: tuples become lists, as in a saved config.json."""
    data = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    try:
        return dict(json.loads(json.dumps(data, default=_as_plain)))
    except (TypeError, ValueError) as error:
        raise SourceError(
            "bad-json", "the model's config cannot be written as JSON", found=str(error)[:200]
        ) from error


def plain_config(config: Any) -> dict[str, Any]:
    """A PEFT config as the JSON that PEFT would save."""
    data = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    for name in ("peft_type", "task_type"):
        value = data.get(name)
        data[name] = getattr(value, "value", value)
    return plain_json(data)


def _as_plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "__dict__") and not callable(value):
        return vars(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
