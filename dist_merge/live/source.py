"""Local shards of a live state dict, described and read as if they were files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..adapters.keys import AdapterNames
from ..errors import SourceError
from ..gather import digest_tensor
from ..group import Group
from ..inspect_sources import OpenSources
from ..records import LocalShard, SourceInventory
from ..request import LIVE
from ..sources.keys import clean_key
from ..sources.rank_files import describe_value, local_tensor
from ..wire import decode_shards, encode_shards
from .model import LiveModel


class LiveReader:
    """This rank's shards of a live model.

    Args:
        state: State-dict key -> DTensor, ShardedTensor or plain tensor.
        rank: This rank.
        snapshot: Copies of the local pieces by key; without, the live ones are read.

    Memory: none of its own.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        rank: int,
        snapshot: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.file = f"live/rank_{rank}"
        self._pieces = dict(snapshot) if snapshot is not None else list_pieces(state)
        self._shards = self._describe(state)

    def _describe(self, state: Mapping[str, Any]) -> list[LocalShard]:
        shards: list[LocalShard] = []
        cleaned: dict[str, str] = {}
        for key, value in state.items():
            fqn = clean_key(key)
            if fqn in cleaned:
                raise SourceError(
                    "key-collision",
                    f"two tensors have the name `{fqn}` once wrappers are removed",
                    found=f"`{cleaned[fqn]}` and `{key}`",
                )
            cleaned[fqn] = key
            if is_sharded_tensor(value):
                shards += describe_sharded(fqn, key, value, file=self.file)
            else:
                shards.append(describe_value(fqn, key, value, file=self.file, holder=0))
        return shards

    def describe(self, holder: int) -> list[LocalShard]:
        """See `contracts.SourceReader`."""
        return [replace(shard, holder=holder) for shard in self._shards]

    def read(self, source_file: str, source_key: str) -> torch.Tensor:
        """See `contracts.SourceReader`; a piece may lie on a GPU."""
        return self._pieces[source_key]

    def cuda_device(self) -> str | None:
        """CUDA device on which pieces lie; pieces offloaded to the host may lie beside them."""
        found = {str(p.device) for p in self._pieces.values() if p.device.type == "cuda"}
        return min(found, default=None)

    def hash_shards(self, group: Group) -> dict[str, str]:
        """One SHA256 over names, places and 128-bit digests of this rank's pieces."""
        rows = []
        for shard in sorted(self._shards, key=lambda shard: (shard.fqn, shard.source_key)):
            digest = digest_tensor(self.read(shard.source_file, shard.source_key), group=group)
            rows.append(
                [
                    shard.fqn,
                    shard.dtype,
                    shard.global_shape,
                    shard.offsets,
                    shard.sizes,
                    digest.hex(),
                ]
            )
        text = json.dumps(rows, separators=(",", ":"))
        return {self.file: hashlib.sha256(text.encode()).hexdigest()}

    def notes(self) -> list[str]:
        """See `contracts.SourceReader`."""
        return []

    def close(self) -> None:
        """Forget the tensors; the model keeps its own."""
        self._pieces = {}


def list_pieces(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Source key -> this rank's piece, a view of the live tensor."""
    pieces: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if is_sharded_tensor(value):
            for number, shard in enumerate(value.local_shards()):
                pieces[f"{key}#{number}"] = shard.tensor.detach()
        elif isinstance(value, torch.Tensor):
            pieces[key] = local_tensor(value)
    return pieces


def take_snapshot(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of this rank's pieces in host memory, pinned where they come from a GPU.

    Memory: one copy of the local shards.
    """
    copies: dict[str, torch.Tensor] = {}
    devices = set()
    for key, piece in list_pieces(state).items():
        on_gpu = piece.device.type == "cuda"
        copy = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=on_gpu)
        copy.copy_(piece, non_blocking=on_gpu)
        copies[key] = copy
        if on_gpu:
            devices.add(piece.device)
    for device in devices:
        torch.cuda.synchronize(device)
    return copies


def is_sharded_tensor(value: Any) -> bool:
    """Tell whether a value is FSDP1's ShardedTensor."""
    return type(value).__name__ == "ShardedTensor" and hasattr(value, "local_shards")


def describe_sharded(fqn: str, key: str, value: Any, *, file: str) -> list[LocalShard]:
    """Describe the local shards of a ShardedTensor."""
    shape = tuple(value.metadata().size)
    return [
        LocalShard(
            fqn=fqn,
            global_shape=shape,
            dtype=str(shard.tensor.dtype).removeprefix("torch."),
            offsets=tuple(shard.metadata.shard_offsets),
            sizes=tuple(shard.tensor.shape),
            holder=0,
            source_file=file,
            source_key=f"{key}#{number}",
        )
        for number, shard in enumerate(value.local_shards())
    ]


@dataclass(frozen=True)
class LiveInput:
    """A live model on all ranks, or with `snapshot` a copy of its local pieces."""

    model: LiveModel
    adapter_name: str
    snapshot: Mapping[str, torch.Tensor] | None = None

    def open(self, group: Group) -> OpenSources:
        """See `merge_job.Input`.

        Raises:
            SourceError: A value is no tensor, or lies in an unknown way.
        """
        model, snapshot = self.model, self.snapshot
        reader = group.prepare(
            "describe-live", lambda: LiveReader(model.state, rank=group.rank, snapshot=snapshot)
        )
        payloads = group.exchange("shards", encode_shards(reader.describe(group.rank), []))
        devices = group.exchange("devices", (reader.cuda_device() or "").encode())
        text = json.dumps(model.config, sort_keys=True)
        inventory = SourceInventory(
            backend=LIVE,
            files=(),
            holders={},
            shards=tuple(shard for payload in payloads for shard in decode_shards(payload)[0]),
            world_size=group.size,
            actor_config=model.config,
            actor_config_sha256=hashlib.sha256(text.encode()).hexdigest(),
        )
        device = devices[group.rank].decode() if all(devices) else None
        return OpenSources(inventory, reader, reader.hash_shards, None, device)

    def find_settings(
        self, names: AdapterNames, sources: OpenSources, group: Group
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """See `merge_job.Input`: the model's own PEFT config is the authority."""
        config = self.model.adapters.get(self.adapter_name)
        return [] if config is None else [(f"{self.adapter_name}/peft_config", config)]
