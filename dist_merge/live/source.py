"""Local shards of a live state dict, described and read as if they were files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..adapters.keys import AdapterNames
from ..errors import MergeError
from ..gather import digest_tensor
from ..group import Group
from ..inspect_sources import OpenSources
from ..records import LocalShard, SourceInventory
from ..request import LIVE
from ..sources.keys import clean_names
from ..sources.pieces import Piece, PieceDescriber, name_part, take_data
from ..wire import decode_shards, encode_shards
from .model import LiveModel


class LiveReader:
    """This rank's pieces of a live model.

    Memory: none of its own.
    """

    def __init__(self, pieces: Sequence[Piece], *, rank: int) -> None:
        self.name = f"live/rank_{rank}"
        self._pieces = {piece.source_key: replace(piece, source_file=self.name) for piece in pieces}

    def describe(self, holder: int) -> list[LocalShard]:
        """See `contracts.SourceReader`."""
        return [piece.make_shard(holder) for piece in self._pieces.values()]

    def read(self, source_file: str, source_key: str) -> torch.Tensor:
        """See `contracts.SourceReader`; a piece may lie on a GPU."""
        return self._pieces[source_key].tensor

    def cuda_device(self) -> str | None:
        """CUDA device on which pieces lie; pieces offloaded to the host may lie beside them."""
        devices = (piece.tensor.device for piece in self._pieces.values())
        return min((str(device) for device in devices if device.type == "cuda"), default=None)

    def hash_shards(self, group: Group) -> dict[str, str]:
        """One SHA256 over names, places and 128-bit digests of this rank's pieces."""
        rows = []
        for key in sorted(self._pieces):
            shard = self._pieces[key].make_shard(0)
            digest = digest_tensor(self._pieces[key].tensor, group=group).hex()
            rows.append(
                [shard.fqn, shard.dtype, shard.global_shape, shard.offsets, shard.sizes, digest]
            )
        text = json.dumps(rows, separators=(",", ":"))
        return {self.name: hashlib.sha256(text.encode()).hexdigest()}

    def notes(self) -> list[str]:
        """See `contracts.SourceReader`."""
        return []

    def close(self) -> None:
        """Forget the tensors; the model keeps its own."""
        self._pieces = {}


def list_pieces(state: Mapping[str, Any]) -> list[Piece]:
    """This rank's pieces of a state dict; their data are views of the live tensors.

    Raises:
        SourceError: A value is no tensor, or lies in an unknown way.
    """
    names, _ = clean_names(state, where="the state dict")
    describer = PieceDescriber(path="the state dict", rank=None)
    pieces: list[Piece] = []
    for fqn, key in names.items():
        if is_sharded_tensor(state[key]):
            pieces += describe_sharded(fqn, key, state[key])
        else:
            pieces += describer.describe(fqn, key, state[key])
    return pieces


def take_snapshot(pieces: Sequence[Piece]) -> list[Piece]:
    """Copy pieces to host memory, pinned where they come from a GPU.

    Memory: one copy of the local shards.
    """
    copies = []
    devices = set()
    for piece in pieces:
        on_gpu = piece.tensor.device.type == "cuda"
        copy = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=on_gpu)
        copy.copy_(piece.tensor, non_blocking=on_gpu)
        copies.append(replace(piece, tensor=copy))
        if on_gpu:
            devices.add(piece.tensor.device)
    for device in devices:
        torch.cuda.synchronize(device)
    return copies


def is_sharded_tensor(value: Any) -> bool:
    """Tell whether a value is a live ShardedTensor of FSDP1."""
    return type(value).__name__ == "ShardedTensor" and hasattr(value, "local_shards")


def describe_sharded(fqn: str, key: str, value: Any) -> Iterator[Piece]:
    """Yield the local shards of a live ShardedTensor."""
    shape, shards = tuple(value.metadata().size), value.local_shards()
    for number, shard in enumerate(shards):
        data = take_data(shard.tensor, value.dtype)
        offsets = tuple(shard.metadata.shard_offsets)
        yield Piece(fqn, shape, offsets, data, "", name_part(key, number, len(shards)))


@dataclass(frozen=True)
class LiveInput:
    """A live model on all ranks; with `snapshot` copies of its pieces take their place.

    An error in place of the copies is raised on all ranks.
    """

    model: LiveModel
    adapter_name: str
    snapshot: Sequence[Piece] | MergeError | None = None

    def open(self, group: Group) -> OpenSources:
        """See `merge_job.Input`.

        Raises:
            SourceError: A value is no tensor, or lies in an unknown way.
        """

        def describe() -> LiveReader:
            if isinstance(self.snapshot, MergeError):
                raise self.snapshot
            pieces = list_pieces(self.model.state) if self.snapshot is None else self.snapshot
            return LiveReader(pieces, rank=group.rank)

        reader = group.prepare("describe-live", describe)
        payloads = group.exchange("shards", encode_shards(reader.describe(group.rank), []))
        devices = group.exchange("devices", (reader.cuda_device() or "").encode())
        text = json.dumps(self.model.config, sort_keys=True)
        inventory = SourceInventory(
            backend=LIVE,
            files=(),
            holders={},
            shards=tuple(shard for payload in payloads for shard in decode_shards(payload)[0]),
            world_size=group.size,
            actor_config=self.model.config,
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
