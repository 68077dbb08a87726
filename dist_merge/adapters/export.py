"""The adapter folder: one that PEFT and one that Diffusers loads, with the right strength.

Each library only knows its own keys. Diffusers given PEFT's file loads nothing and raises nothing;
without the config in the header of its own file it takes alpha = r.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..operations import Read
from ..records import AdapterPlan, OutputShard, OutputTensor, TensorSpec, item_nbytes
from .settings import ADAPTER_DIR

PEFT_WEIGHTS = "adapter_model.safetensors"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
PEFT_PREFIX = "base_model.model."
# Diffusers uses this prefix for a pipeline's second transformer as well.
DIFFUSERS_PREFIX = "transformer."
DIFFUSERS_METADATA = "lora_adapter_metadata"


def make_adapter_shards(
    adapter: AdapterPlan,
    *,
    specs: Mapping[str, TensorSpec],
    base_name: str | None,
    modules: Iterable[str],
) -> tuple[OutputShard, ...]:
    """Plan the two weight files of the adapter folder; dtypes are the checkpoint's.

    Args:
        adapter: The adapter.
        specs: Shape and dtype by FQN.
        base_name: Name of the base model for the config.
        modules: All modules of the model that are known.
    """
    config = make_peft_config(adapter, base_name=base_name, modules=modules)
    headers = {
        (PEFT_WEIGHTS, PEFT_PREFIX): {"format": "pt"},
        (DIFFUSERS_WEIGHTS, DIFFUSERS_PREFIX): {
            "format": "pt",
            DIFFUSERS_METADATA: encode_metadata(config),
        },
    }
    shards = []
    for (file, prefix), header in headers.items():
        tensors = [
            OutputTensor(prefix + item.key, specs[item.fqn], Read(item.fqn), (item.fqn,))
            for item in adapter.exports
        ]
        # Wide dtypes first, so that every tensor lies aligned.
        tensors.sort(key=lambda tensor: (-item_nbytes(tensor.spec.dtype), tensor.name))
        shards.append(OutputShard(f"{ADAPTER_DIR}/{file}", header, tuple(tensors), is_adapter=True))
    return tuple(shards)


def encode_metadata(config: Mapping[str, Any]) -> str:
    """The adapter's config as Diffusers reads it from the header of its file."""
    return json.dumps({DIFFUSERS_PREFIX + name: config[name] for name in config}, sort_keys=True)


def make_peft_config(
    adapter: AdapterPlan, *, base_name: str | None, modules: Iterable[str]
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    `task_type` is null: what trainers record there (CAUSAL_LM) makes PEFT look for methods that
    these models do not have. The initialisation is the default: the factors are loaded anyway,
    and another one would change the base's weights while loading.
    """
    ranks, alphas = Counter(adapter.ranks.values()), Counter(adapter.alphas.values())
    r = adapter.r if adapter.r in ranks or not ranks else ranks.most_common(1)[0][0]
    alpha = adapter.lora_alpha
    if alphas and alpha not in alphas:
        alpha = alphas.most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
        "lora_bias": adapter.lora_bias,
        "bias": adapter.bias,
        "fan_in_fan_out": adapter.fan_in_fan_out,
        "init_lora_weights": True,
        "rank_pattern": {f"^{name}": value for name, value in adapter.ranks.items() if value != r},
        "alpha_pattern": {
            f"^{name}": value for name, value in adapter.alphas.items() if value != alpha
        },
        "target_modules": choose_targets(adapter.ranks, modules=modules),
        "modules_to_save": list(adapter.saved_modules) or None,
    }


def read_planned_config(shards: Iterable[OutputShard]) -> dict[str, Any]:
    """Return the content of `adapter_config.json` as it stands in the planned header."""
    (text,) = (
        shard.metadata[DIFFUSERS_METADATA]
        for shard in shards
        if DIFFUSERS_METADATA in shard.metadata
    )
    return {k.removeprefix(DIFFUSERS_PREFIX): value for k, value in json.loads(text).items()}


def choose_targets(targets: Iterable[str], *, modules: Iterable[str]) -> list[str] | str:
    """Name the target modules: full paths, or a pattern where a path would match others too.

    PEFT takes a listed name as a suffix: `proj_out` also matches `blocks.0.proj_out`.
    """
    names = sorted(targets)
    others = {*modules, *names}
    tails: set[str] = set()
    for module in others:
        parts = module.split(".")
        tails |= {".".join(parts[start:]) for start in range(1, len(parts))}
    # Without a list of all modules a single name could be the tail of any.
    unsafe = [name for name in names if name in tails or "." not in name]
    if unsafe:
        return "|".join(re.escape(name) for name in names)
    return names


def name_base(base_model: str | Path | None) -> str | None:
    """Name of the base for a config: a repository's name as it is, of a folder its last part."""
    if base_model is None:
        return None
    path = Path(base_model)
    return path.resolve().name if path.exists() or path.is_absolute() else str(base_model)
