"""Read and write the header of a safetensors file; strict, and never touches the payload.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ArtifactError
from .records import DTYPES, SAFETENSORS_DTYPES, TensorSpec

MAX_HEADER_NBYTES = 100_000_000
MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor: its spec and its byte range relative to the payload's start."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """A parsed header; `nbytes` includes the 8-byte length, so the payload starts there."""

    nbytes: int
    metadata: Mapping[str, str]
    tensors: Mapping[str, HeaderEntry]


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Raises:
        ArtifactError: The header breaks a rule of the format, or the file's size does not fit it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER_NBYTES, size - 8):
            raise make_error(path, f"header of {length} bytes in a file of {size} bytes")
        raw = file.read(length)
    if raw[:1] != b"{":
        raise make_error(path, "header does not start with `{`")
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_object)
    except (ValueError, RecursionError) as error:
        raise make_error(path, f"header is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise make_error(path, "header is no JSON object")
    metadata = data.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise make_error(path, "`__metadata__` is no map of text to text")
    tensors = {name: parse_entry(path, name, entry) for name, entry in data.items()}
    check_layout(path, tensors, payload_nbytes=size - 8 - length)
    return SafetensorsHeader(8 + length, metadata, tensors)


def parse_entry(path: Path, name: str, entry: Any) -> HeaderEntry:
    """Parse one tensor's entry."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise make_error(path, f"tensor `{name}` has a malformed entry")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        raise make_error(path, f"tensor `{name}` has unknown dtype {dtype!r}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise make_error(path, f"tensor `{name}` has a malformed shape or offsets")
    spec = TensorSpec(tuple(shape), SAFETENSORS_DTYPES[dtype])
    if offsets[1] - offsets[0] != spec.nbytes:
        raise make_error(path, f"tensor `{name}`: offsets {offsets} are not {spec.nbytes} bytes")
    return HeaderEntry(spec, offsets[0], offsets[1])


def check_layout(path: Path, tensors: Mapping[str, HeaderEntry], *, payload_nbytes: int) -> None:
    """Check that the tensors fill the payload without hole or overlap."""
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise make_error(path, f"tensor `{name}` starts at {entry.begin}, not at {position}")
        position = entry.end
    if position != payload_nbytes:
        raise make_error(path, f"tensors end at {position}, the file at {payload_nbytes}")


def encode_header(entries: Sequence[tuple[str, TensorSpec]], metadata: Mapping[str, str]) -> bytes:
    """Return length and JSON for tensors laid in the given order, padded to 8 bytes.

    Raises:
        ArtifactError: Two tensors of one name, or one named like the metadata.
    """
    names = {name for name, _ in entries}
    if len(names) != len(entries) or "__metadata__" in names:
        raise ArtifactError("bad-safetensors", "two tensors of one file have the same name")
    data: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, spec in entries:
        end = position + spec.nbytes
        data[name] = {
            "dtype": DTYPES[spec.dtype][0],
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def make_error(path: Path, found: str) -> ArtifactError:
    """Make the one error of this module."""
    return ArtifactError(
        "bad-safetensors",
        "a safetensors file is damaged or not one",
        where=f"`{path.parent.name}/{path.name}`",
        found=found,
        hint="fetch or write the file again; a file of a few lines may be a Git LFS pointer",
    )


def _is_sizes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMS
        and all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**62
            for item in value
        )
    )


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate keys")
    return result
