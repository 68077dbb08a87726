"""Inert stand-ins for FSDP1's `ShardedTensor`, whose own class wants a process group to be read.

Only what the file says is kept: local shards, their offsets and sizes, the writer's rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SourceError

SHARD = "torch.distributed._shard"
CLASS_NAME = f"{SHARD}.sharded_tensor.api.ShardedTensor"
RECORDS = (
    f"{SHARD}.sharded_tensor.shard.Shard",
    f"{SHARD}.metadata.ShardMetadata",
    f"{SHARD}.sharded_tensor.metadata.ShardedTensorMetadata",
    f"{SHARD}.sharded_tensor.metadata.TensorProperties",
    f"{SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    f"{SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    f"{SHARD}.sharding_spec.api.EnumerableShardingSpec",
    "torch.distributed.remote_device._remote_device",
)


@dataclass(frozen=True, slots=True)
class StoredShard:
    """One local shard: its place in the tensor, and its data."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor


class Record:
    """Keeps the state a pickle gives it, and does nothing else."""

    def __init__(self, *arguments: Any) -> None:
        self.fields: Mapping[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        # Classes with slots are pickled as (dictionary, slots).
        parts = state if isinstance(state, tuple) else (state,)
        self.fields = {k: v for part in parts if isinstance(part, dict) for k, v in part.items()}


class ShardedTensorView(torch.Tensor):
    """Stands in for a ShardedTensor: shape and dtype of the whole, and `state` as it was saved."""

    state: Any = None

    class ProcessGroupState(Record):
        """Ranks and sizes of the group that saved."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Detaching is all that is ever asked for, by torch itself."""
        if func is torch.ops.aten.detach.default:
            view: torch.Tensor = args[0]
            return view
        raise TypeError(f"{func} on a tensor that is only described")


def look_up(owner: Any, name: str) -> Any:
    """Answer the one look-up such files make; stands in for `getattr`."""
    if owner is ShardedTensorView and name == "ProcessGroupState":
        return ShardedTensorView.ProcessGroupState
    raise pickle.UnpicklingError(f"look-up of `{name}`")


def list_stand_ins(wanted: list[str]) -> list[tuple[Any, str]]:
    """Stand-ins for a file that holds ShardedTensors: (stand-in, name in the file)."""
    if CLASS_NAME not in wanted:
        return []
    table: dict[str, Any] = {CLASS_NAME: ShardedTensorView, "builtins.getattr": look_up}
    table |= {name: type(name.rpartition(".")[2], (Record,), {}) for name in RECORDS}
    # Asked for by its own name when it is built, though no file spells it.
    nested = f"{CLASS_NAME}.ProcessGroupState"
    return [
        *((stand_in, name) for name, stand_in in table.items() if name in wanted),
        (ShardedTensorView.ProcessGroupState, nested),
    ]


def read_shards(value: ShardedTensorView) -> tuple[list[StoredShard], int | None]:
    """Return the local shards, and the rank that saved them.

    Raises:
        SourceError: The structure is another one, or contradicts itself.
    """
    try:
        local_shards, metadata, group = value.state[:3]
        claimed = {read_box(shard.fields) for shard in metadata.fields["shards_metadata"]}
        if tuple(metadata.fields["size"]) != tuple(value.shape):
            raise ValueError(f"sizes {list(metadata.fields['size'])} and {list(value.shape)}")
        shards = []
        for shard in local_shards:
            offsets, sizes = read_box(shard.fields["metadata"].fields)
            if (offsets, sizes) not in claimed and 0 not in sizes:
                raise ValueError(f"a shard at {list(offsets)} is not in the tensor's own list")
            tensor = shard.fields["tensor"]
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"a shard at {list(offsets)} is no tensor")
            shards.append(StoredShard(offsets, sizes, tensor))
        rank = group.fields.get("global_rank")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(
            "sharded-tensor-invalid",
            "a ShardedTensor cannot be read",
            found=f"{type(error).__name__}: {error}",
            hint="the file is damaged, or of a torch release this version does not know",
        ) from error
    return shards, None if rank is None else int(rank)


def read_box(fields: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of one shard."""
    return (
        tuple(int(n) for n in fields["shard_offsets"]),
        tuple(int(n) for n in fields["shard_sizes"]),
    )
