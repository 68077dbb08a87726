"""Records as JSON bytes, to travel between ranks: data only, never pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

from .records import BaseModel, LocalShard, SourceFile, TensorSpec


def encode_shards(shards: Sequence[LocalShard], notes: Sequence[str]) -> bytes:
    """Encode what one rank holds."""
    return json.dumps([[astuple(shard) for shard in shards], list(notes)]).encode()


def decode_shards(payload: bytes) -> tuple[list[LocalShard], list[str]]:
    """Decode what another rank holds."""
    rows, notes = json.loads(payload)
    return [LocalShard(*(_tuples(value) for value in row)) for row in rows], list(notes)


def encode_base(base: BaseModel) -> bytes:
    """Encode the description of the base."""
    return json.dumps(asdict(base)).encode()


def decode_base(payload: bytes) -> BaseModel:
    """Decode the description of the base."""
    data = json.loads(payload)
    data["tensors"] = {
        name: TensorSpec(tuple(spec["shape"]), spec["dtype"])
        for name, spec in data["tensors"].items()
    }
    for name in ("files", "replaced"):
        data[name] = tuple(SourceFile(**file) for file in data[name])
    for name in ("keep_in_fp32", "left_out"):
        data[name] = tuple(data[name])
    data["edited_configs"] = {path: tuple(keys) for path, keys in data["edited_configs"].items()}
    return BaseModel(**data)


def encode_files(files: Sequence[SourceFile]) -> bytes:
    """Encode a listing."""
    return json.dumps([astuple(file) for file in files]).encode()


def decode_files(payload: bytes) -> list[SourceFile]:
    """Decode a listing."""
    return [SourceFile(*row) for row in json.loads(payload)]


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
