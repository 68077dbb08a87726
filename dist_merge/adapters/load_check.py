"""Load a written adapter folder through PEFT and through Diffusers, and compare what arrived."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..architectures import find_trained
from ..errors import ArtifactError, make_list
from ..model_class import import_model_class
from ..records import AdapterPlan
from .export import DIFFUSERS_WEIGHTS, PEFT_PREFIX, PEFT_WEIGHTS
from .settings import CONFIG_NAME

ADAPTER = "default"


def check_adapter_load(
    folder: Path, adapter: AdapterPlan, *, class_name: str, config: Mapping[str, Any]
) -> str:
    """Load the folder into the model's class, built without data, in both libraries.

    Args:
        folder: The adapter folder.
        adapter: What was planned.
        class_name: Class of the trained model.
        config: Its config.

    Returns:
        `passed`, or `not_run` where the class or PEFT is not installed.

    Raises:
        ArtifactError: A tensor is missing, unexpected or different after loading, or a module
            has another scaling.
    """
    architecture = find_trained(class_name)
    cls = import_model_class(architecture.module, class_name) if architecture else None
    if cls is None or import_model_class("peft", "LoraConfig") is None:
        return "not_run"
    # Factors are made on the meta device, so that no random number of a trainer is used up.
    check_loaded(folder, adapter, load_with_peft(cls, config, folder), library="PEFT")
    if hasattr(cls, "load_lora_adapter"):
        loaded = load_with_diffusers(cls, config, folder)
        check_loaded(folder, adapter, loaded, library="Diffusers")
    return "passed"


def build(cls: type, config: Mapping[str, Any]) -> Any:
    """Build a model whose weights are never touched, so that they take no memory.

    Not on the meta device: PEFT moves a loaded adapter to the device of the weights.
    """
    from inspect import signature

    known = signature(cls).parameters
    with torch.device("meta"):
        model: Any = cls(**{name: value for name, value in config.items() if name in known})
    return model.to_empty(device="cpu")


def load_with_peft(cls: type, config: Mapping[str, Any], folder: Path) -> Any:
    """Load the folder as `PeftModel.from_pretrained` does."""
    import peft
    from safetensors.torch import load_file

    settings = json.loads((folder / CONFIG_NAME).read_text())
    settings.pop("peft_type")
    wrapped = peft.PeftModel(build(cls, config), peft.LoraConfig(**settings), ADAPTER,
                             low_cpu_mem_usage=True)  # fmt: skip
    peft.set_peft_model_state_dict(
        wrapped, load_file(folder / PEFT_WEIGHTS), ADAPTER, low_cpu_mem_usage=True
    )
    return wrapped.base_model.model


def load_with_diffusers(cls: type, config: Mapping[str, Any], folder: Path) -> Any:
    """Load the folder as a pipeline's `load_lora_weights` does."""
    model = build(cls, config)
    model.load_lora_adapter(
        str(folder), weight_name=DIFFUSERS_WEIGHTS, adapter_name=ADAPTER, low_cpu_mem_usage=True
    )
    return model


def check_loaded(folder: Path, adapter: AdapterPlan, model: Any, *, library: str) -> None:
    """Compare the loaded adapter with PEFT's file, bit for bit, and every module's scaling."""
    import peft
    from safetensors.torch import load_file

    # Without embeddings: to find out whether they changed, PEFT would ask the hub for the base.
    found = peft.get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    # A model that PEFT does not wrap has keys without its prefix.
    found = {name.removeprefix(PEFT_PREFIX): value for name, value in found.items()}
    wanted = load_file(folder / PEFT_WEIGHTS)
    wanted = {name.removeprefix(PEFT_PREFIX): value for name, value in wanted.items()}
    if adapter.bias != "none":
        wanted = {name: value for name, value in wanted.items() if name in found}
    wrong = [
        name
        for name in found.keys() | wanted.keys()
        if name not in found
        or name not in wanted
        or found[name].is_meta
        or not torch.equal(found[name].to(wanted[name].dtype), wanted[name])
    ]
    modules = dict(model.named_modules())
    scalings = {
        name: modules[name].scaling.get(ADAPTER)
        for name in adapter.scalings
        if hasattr(modules.get(name), "scaling")
    }
    wrong += [name for name, value in adapter.scalings.items() if scalings.get(name) != value]
    if wrong:
        raise ArtifactError(
            "adapter-load-mismatch",
            f"the written adapter does not load through {library} as it was trained: "
            f"{make_list(wrong)}",
            where=f"`{folder.name}`",
            hint="do not use this folder; report the versions of peft and diffusers",
        )
