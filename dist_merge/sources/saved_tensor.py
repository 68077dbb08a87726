"""One tensor that `torch.save` wrote as a zip at some place in a larger file.

Only the zip's directory and its small pickle are read; the payload is found, not touched.
Source: torch/serialization.py (`_save`), torch/_utils.py (`_rebuild_tensor_v2`).
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SourceError
from ..records import item_nbytes
from .dcp_metadata import DTYPE_NAMES, make_sizes
from .inert_pickle import load_inert, unreadable
from .mapped import MappedFile, count_span
from .unpickle import first_line, unsafe_error

LOCAL_HEADER_NBYTES = 30
MAX_PICKLE_NBYTES = 2**20
STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ComplexFloatStorage": "complex64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Where a tensor lies: `start` is the byte of its first element in the file."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What the pickle says: a storage, and how the tensor lies in it (counted in elements)."""

    storage: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None


class RangeFile(io.RawIOBase):
    """A byte range of a mapped file, as a file of its own."""

    def __init__(self, mapped: MappedFile, *, start: int, nbytes: int) -> None:
        self._buffer = mapped.buffer
        self._start, self._nbytes, self._position = start, nbytes, 0

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """See `io.RawIOBase`."""
        position = offset + (0, self._position, self._nbytes)[whence]
        if position < 0:
            raise OSError("seek before the start")
        self._position = position
        return position

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """See `io.RawIOBase`."""
        left = max(0, self._nbytes - self._position)
        size = left if size is None or size < 0 else min(size, left)
        begin = self._start + self._position
        self._position += size
        return self._buffer[begin : begin + size]


def find_tensor(mapped: MappedFile, *, start: int, nbytes: int) -> SavedTensor:
    """Parse the zip in a byte range of a file and find its one tensor.

    Raises:
        SourceError: It is damaged, holds anything but one plain tensor, or one that does not fit
            its storage.
    """
    path = mapped.path
    file = RangeFile(mapped, start=start, nbytes=nbytes)
    try:
        with zipfile.ZipFile(file) as archive:
            records = {
                info.filename.partition("/")[2]: locate_record(file, info)
                for info in archive.infolist()
            }
        if "byteorder" in records and read_record(file, records["byteorder"]) != b"little":
            raise ValueError("written on a big-endian machine")
        rebuilt = load_inert(
            read_record(file, records["data.pkl"]), path=path, allowed=make_table()
        )
        if not isinstance(rebuilt, Rebuilt):
            raise ValueError(f"{type(rebuilt).__name__} where a tensor is expected")
        return place_tensor(rebuilt, records, path=path, base=start)
    except SourceError:
        raise
    # A damaged archive can raise nearly anything from the reader of archives.
    except Exception as error:
        raise unreadable(path, first_line(error)) from error


def locate_record(file: RangeFile, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Start (relative to the range) and size of one record's bytes, which must be stored plain."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ValueError(f"record {info.filename!r} is compressed")
    file.seek(info.header_offset)
    header = file.read(LOCAL_HEADER_NBYTES)
    if header[:4] != b"PK\x03\x04":
        raise ValueError(f"record {info.filename!r} has no header")
    name_nbytes, extra_nbytes = struct.unpack("<HH", header[26:30])
    begin = info.header_offset + LOCAL_HEADER_NBYTES + name_nbytes + extra_nbytes
    if begin + info.file_size > file.seek(0, 2):
        raise ValueError(f"record {info.filename!r} ends behind the file's part")
    return begin, info.file_size


def read_record(file: RangeFile, record: tuple[int, int]) -> bytes:
    """Read one small record."""
    begin, nbytes = record
    if nbytes > MAX_PICKLE_NBYTES:
        raise ValueError(f"a description of {nbytes} bytes")
    file.seek(begin)
    return file.read(nbytes)


def make_table() -> dict[str, Any]:
    """Stand-ins for everything a plain tensor's pickle may name."""
    table: dict[str, Any] = {f"torch.{name}": name for name in STORAGE_DTYPES}
    table |= {f"torch.{name}": name for name in DTYPE_NAMES}
    table["torch.storage.UntypedStorage"] = "UntypedStorage"
    table["torch._utils._rebuild_tensor_v2"] = rebuild_tensor
    table["torch._utils._rebuild_tensor_v3"] = rebuild_typed_tensor
    table["torch._utils._rebuild_parameter"] = rebuild_parameter
    table["torch.Size"] = make_sizes
    table["collections.OrderedDict"] = dict
    return table


def rebuild_tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> Rebuilt:
    """Stand in for `torch._utils._rebuild_tensor_v2`."""
    if metadata:
        raise ValueError(f"a tensor with {metadata!r}")
    (offset,) = make_sizes((offset,))
    return Rebuilt(storage, offset, make_sizes(shape), make_sizes(strides), None)


def rebuild_typed_tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Rebuilt:
    """Stand in for `torch._utils._rebuild_tensor_v3`."""
    plain = rebuild_tensor(storage, offset, shape, strides, metadata=metadata)
    return Rebuilt(plain.storage, plain.offset, plain.shape, plain.strides, str(dtype))


def rebuild_parameter(data: Any, requires_grad: Any = False, hooks: Any = None) -> Any:
    """Stand in for `torch._utils._rebuild_parameter`."""
    return data


def place_tensor(
    rebuilt: Rebuilt, records: Mapping[str, tuple[int, int]], *, path: Path, base: int
) -> SavedTensor:
    """Check that a tensor fits its storage, and find its first byte."""
    kind, storage_type, key, _, _ = rebuilt.storage
    if kind != "storage":
        raise unsafe_error(path, f"a stored {kind!r}")
    dtype = rebuilt.dtype or STORAGE_DTYPES[storage_type]
    begin, nbytes = records[f"data/{key}"]
    width = item_nbytes(dtype)
    if len(rebuilt.shape) != len(rebuilt.strides):
        raise ValueError(f"shape {rebuilt.shape}, strides {rebuilt.strides}")
    if 0 not in rebuilt.shape:
        needed = (rebuilt.offset + count_span(rebuilt.shape, rebuilt.strides)) * width
        if needed > nbytes:
            raise ValueError(f"a tensor of {needed} bytes in a storage of {nbytes}")
    return SavedTensor(dtype, rebuilt.shape, rebuilt.strides, base + begin + rebuilt.offset * width)
