"""What `inspect` reports: the checkpoint, and the plan of its merge, as JSON-ready data."""

from __future__ import annotations

from typing import Any

from .adapters.keys import sort_names
from .inspect_sources import OpenSources
from .records import MergePlan


def describe_inventory(sources: OpenSources) -> dict[str, Any]:
    """What the checkpoint folder holds, as JSON-ready data."""
    inventory = sources.inventory
    tensors = {shard.fqn: shard for shard in inventory.shards}
    names = sort_names(tensors)
    dtypes: dict[str, int] = {}
    for shard in tensors.values():
        dtypes[shard.dtype] = dtypes.get(shard.dtype, 0) + 1
    return {
        "backend": inventory.backend,
        "world_size": inventory.world_size,
        "files": {file.path: file.nbytes for file in inventory.files},
        "num_tensors": len(tensors),
        "num_sharded_tensors": len({s.fqn for s in inventory.shards if not s.is_whole_copy}),
        "dtypes": dtypes,
        "adapters": names.adapters,
        "is_lora_only": names.is_lora_only,
        "actor_class": (inventory.actor_config or {}).get("_class_name"),
        "notes": list(inventory.notes),
    }


def describe_plan(plan: MergePlan) -> dict[str, Any]:
    """What a merge would do, as JSON-ready data."""
    return {
        "artifact_type": plan.artifact_type,
        "architecture": plan.architecture,
        "output_files": {shard.path: shard.nbytes for shard in plan.output_shards},
        "num_tensors": sum(len(shard.tensors) for shard in plan.output_shards),
        "num_buckets": len(plan.buckets),
        "dtype_changes": {name: list(pair) for name, pair in plan.dtype_changes.items()},
        "adapter": None if plan.adapter is None else plan.adapter.name,
        "is_fused": plan.adapter is not None and plan.adapter.is_fused,
        "notes": list(plan.notes),
    }
