"""Read the base's own tensors on rank 0: to fold an adapter into them, or to compare with them."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from .contracts import SourceReader
from .errors import BaseModelError
from .records import BaseModel, LocalShard
from .safetensors_header import SafetensorsHeader, read_header

PREFIX = "base:"


def is_base_file(source_file: str) -> bool:
    """Tell whether a source is a file of the base model."""
    return source_file.startswith(PREFIX)


def list_base_shards(base: BaseModel) -> list[LocalShard]:
    """Describe the base's weights as pieces that rank 0 holds.

    Raises:
        BaseModelError: The base's tensors have other names than the trained module's.
    """
    if base.is_native:
        raise BaseModelError(
            "format-unsupported",
            "an adapter alone cannot be folded into a base in native form",
            expected=f"the base's Diffusers form, with the tensors of {base.trained_class}",
            found=base.transformer_class,
            hint="merge it with the Diffusers transformer as --base_model and --output_format "
            "transformer, or from a checkpoint of the full model",
        )
    return [
        LocalShard(
            fqn=name,
            global_shape=spec.shape,
            dtype=spec.dtype,
            offsets=(0,) * len(spec.shape),
            sizes=spec.shape,
            holder=0,
            source_file=PREFIX + base.tensor_files[name],
            source_key=name,
        )
        for name, spec in base.tensors.items()
    ]


class BaseReader:
    """Maps the base's weight files; tensors are views, valid until `close`."""

    def __init__(self, base_dir: Path, base: BaseModel) -> None:
        self._base_dir = base_dir
        self._files = base.tensor_files
        self._opened: dict[str, tuple[SafetensorsHeader, torch.Tensor]] = {}

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor of the base by its own name."""
        header, whole = self._open(self._files[name])
        entry = header.tensors[name]
        start = header.nbytes + entry.begin
        dtype = getattr(torch, entry.spec.dtype)
        if entry.spec.nbytes == 0:
            return torch.empty(entry.spec.shape, dtype=dtype)
        block = whole[start : start + entry.spec.nbytes]
        if start % dtype.itemsize:
            block = block.clone()
        return block.view(dtype).view(entry.spec.shape)

    def _open(self, file: str) -> tuple[SafetensorsHeader, torch.Tensor]:
        if file not in self._opened:
            path = self._base_dir / file
            header = read_header(path)
            with path.open("rb") as opened:
                # ACCESS_COPY: torch wants writable memory; nothing is ever written.
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            self._opened[file] = (header, torch.frombuffer(mapped, dtype=torch.uint8))
        return self._opened[file]

    def close(self) -> None:
        """Unmap the files."""
        self._opened = {}


class ReaderWithBase:
    """The checkpoint's files and, on rank 0, the base's, as one reader."""

    def __init__(self, reader: SourceReader, base: BaseReader) -> None:
        self._reader = reader
        self._base = base

    def describe(self, holder: int) -> list[LocalShard]:
        """See `contracts.SourceReader`."""
        return self._reader.describe(holder)

    def read(self, source_file: str, source_key: str) -> torch.Tensor:
        """See `contracts.SourceReader`."""
        if is_base_file(source_file):
            return self._base.read(source_key)
        return self._reader.read(source_file, source_key)

    def notes(self) -> list[str]:
        """See `contracts.SourceReader`."""
        return self._reader.notes()

    def close(self) -> None:
        """See `contracts.SourceReader`."""
        self._reader.close()
        self._base.close()
