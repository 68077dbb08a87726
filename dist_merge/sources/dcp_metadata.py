"""Read the `.metadata` of a torch DCP folder without building one of torch's classes.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py, torch 2.13.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from ..errors import SourceError
from ..files import is_safe_path
from ..records import DTYPES
from .inert_pickle import load_inert, make_record

CHECKPOINT = "torch.distributed.checkpoint"
RECORDS = (
    f"{CHECKPOINT}.metadata.Metadata",
    f"{CHECKPOINT}.metadata.TensorStorageMetadata",
    f"{CHECKPOINT}.metadata.BytesStorageMetadata",
    f"{CHECKPOINT}.metadata.ChunkStorageMetadata",
    f"{CHECKPOINT}.metadata.TensorProperties",
    f"{CHECKPOINT}.metadata.MetadataIndex",
    f"{CHECKPOINT}.metadata.StorageMeta",
    f"{CHECKPOINT}.metadata._MEM_FORMAT_ENCODING",
    f"{CHECKPOINT}.filesystem._StorageInfo",
    # The save folder's own path, which is not used.
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
)
# Every dtype torch can pickle, also those that safetensors cannot hold: an optimizer may use them.
DTYPE_NAMES = frozenset(DTYPES) | {
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float4_e2m1fn_x2",
    "complex32",
    "complex128",
    "qint8",
    "quint8",
    "qint32",
}


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One box of a tensor and the byte range (in bytes) of a file that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor; `path` are the keys that led to it in the state dict that was saved."""

    key: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class DcpMetadata:
    """All tensors, and the keys of what is no tensor."""

    tensors: tuple[StoredTensor, ...]
    other_keys: tuple[str, ...]


def read_metadata(path: Path) -> DcpMetadata:
    """Read `.metadata`.

    Raises:
        SourceError: It wants anything but the metadata classes, is damaged, contradicts itself, or
            its tensors went through a transform (compression, encryption).
    """
    root = load_inert(path.read_bytes(), path=path, allowed=make_table())
    try:
        fields = read_fields(root, "Metadata")
        storage = read_storage(fields["storage_data"])
        paths = fields.get("planner_data") or {}
        tensors, others = [], []
        for key, entry in sorted(fields["state_dict_metadata"].items()):
            if type(entry).__name__ == "BytesStorageMetadata":
                others.append(key)
            else:
                tensors.append(read_tensor(key, entry, paths=paths, storage=storage))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise invalid(f"{type(error).__name__}: {error}") from error
    return DcpMetadata(tuple(tensors), tuple(others))


def make_table() -> dict[str, Any]:
    """Stand-ins for everything a `.metadata` may name."""
    table: dict[str, Any] = {name: make_record(name.rpartition(".")[2]) for name in RECORDS}
    table |= {f"torch.{name}": name for name in DTYPE_NAMES}
    table["torch.Size"] = make_sizes
    table["torch.serialization._get_layout"] = str
    table["torch.device"] = str
    return table


def make_sizes(values: Any = ()) -> tuple[int, ...]:
    """Stand in for `torch.Size`; only whole numbers that are not negative."""
    sizes = tuple(values)
    if not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise ValueError(f"sizes {sizes!r}")
    return sizes


def read_fields(record: Any, name: str) -> Mapping[str, Any]:
    """Return the fields of a stand-in of the class `name`."""
    if type(record).__name__ != name or not isinstance(record.state, dict):
        raise TypeError(f"{type(record).__name__} where {name} is expected")
    fields: Mapping[str, Any] = record.state
    return fields


def read_storage(data: Any) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """Return (key, offsets) -> file, start, bytes."""
    storage = {}
    for index_record, info_record in data.items():
        index, info = (
            read_fields(index_record, "MetadataIndex"),
            read_fields(info_record, "_StorageInfo"),
        )
        if info.get("transform_descriptors"):
            raise SourceError(
                "dcp-transformed",
                "the checkpoint was saved through a transform, such as compression",
                where="`.metadata`",
                found=", ".join(map(str, info["transform_descriptors"])),
                hint="save it without extensions of the storage writer",
            )
        file, start, nbytes = info["relative_path"], info["offset"], info["length"]
        if not isinstance(file, str) or not is_safe_path(file):
            raise ValueError(f"file name {file!r}")
        make_sizes((start, nbytes))
        storage[index["fqn"], make_sizes(index.get("offset") or ())] = (file, start, nbytes)
    return storage


def read_tensor(
    key: Any, entry: Any, *, paths: Mapping[str, Any], storage: Mapping[Any, Any]
) -> StoredTensor:
    """Read one tensor's entry and find its chunks' byte ranges."""
    fields = read_fields(entry, "TensorStorageMetadata")
    properties = fields["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if not isinstance(key, str) or dtype not in DTYPE_NAMES:
        raise ValueError(f"tensor {key!r} of dtype {dtype!r}")
    chunks = []
    for record in fields["chunks"]:
        chunk = read_fields(record, "ChunkStorageMetadata")
        offsets, sizes = make_sizes(chunk["offsets"]), make_sizes(chunk["sizes"])
        where = storage.get((key, offsets))
        if where is None:
            raise ValueError(f"tensor `{key}`: the chunk at {list(offsets)} is in no file")
        chunks.append(StoredChunk(offsets, sizes, *where))
    path = tuple(str(part) for part in paths.get(key, (key,)))
    return StoredTensor(key, path, make_sizes(fields["size"]), dtype, tuple(chunks))


def invalid(found: str) -> SourceError:
    """Make the error for a `.metadata` that contradicts itself."""
    return SourceError(
        "dcp-metadata-invalid",
        "the checkpoint's `.metadata` does not describe a checkpoint",
        where="`.metadata`",
        found=found,
        hint="it is damaged, or was written by a torch release this version does not know",
    )


def encode_metadata(metadata: DcpMetadata) -> bytes:
    """Encode, to travel between ranks: data only."""
    return json.dumps(
        {"tensors": [astuple(t) for t in metadata.tensors], "other_keys": metadata.other_keys}
    ).encode()


def decode_metadata(payload: bytes) -> DcpMetadata:
    """Decode what another rank read."""
    data = json.loads(payload)
    tensors = []
    for key, path, shape, dtype, rows in data["tensors"]:
        chunks = tuple(StoredChunk(tuple(row[0]), tuple(row[1]), *row[2:]) for row in rows)
        tensors.append(StoredTensor(key, tuple(path), tuple(shape), dtype, chunks))
    return DcpMetadata(tuple(tensors), tuple(data["other_keys"]))
