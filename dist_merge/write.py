"""Write one safetensors file in one sequential pass: header first, SHA256 on the way, fsync."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType

import torch

from .group import Group
from .operations import iter_contiguous
from .records import OutputShard
from .safetensors_header import encode_header

# Hashing and writing the same piece while it is in the cache is faster than two long passes.
PIECE_NBYTES = 2**18


class ShardWriter:
    """Writes the tensors of an output shard in the planned order.

    Args:
        path: New file; it must not exist.
        output_shard: The plan of the file, which fixes header and order.
        group: Told about progress.

    Ranks: rank 0 only. Memory: no buffer of its own.
    """

    def __init__(self, path: Path, *, output_shard: OutputShard, group: Group) -> None:
        self.path = path
        self.header = encode_header(
            [(tensor.name, tensor.spec) for tensor in output_shard.tensors],
            dict(output_shard.metadata),
        )
        self._group = group
        self._sha256 = hashlib.sha256()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        self._descriptor = os.open(path, flags, 0o666)
        try:
            self._write(memoryview(self.header))
        except BaseException:
            self.close()
            raise

    def write(self, tensor: torch.Tensor) -> None:
        """Append one tensor's bytes, row-major."""
        for piece in iter_contiguous(tensor):
            data = piece.view(torch.uint8).numpy().data
            for start in range(0, len(data), PIECE_NBYTES):
                self._write(data[start : start + PIECE_NBYTES])
                self._group.advance(min(PIECE_NBYTES, len(data) - start))

    def finish(self) -> str:
        """Flush to the disk and return the file's SHA256."""
        os.fsync(self._descriptor)
        if hasattr(os, "posix_fadvise"):
            # Reading back from the page cache would prove less than reading from the disk.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self.close()
        return self._sha256.hexdigest()

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, data: memoryview) -> None:
        self._sha256.update(data)
        while data:
            data = data[os.write(self._descriptor, data) :]
