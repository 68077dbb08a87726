"""Tensors that lie in byte ranges of a mapped file."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch

from ..records import item_nbytes


class MappedFile:
    """One file, mapped privately: pages come from the disk and nothing is written back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            # A writable private mapping, as torch makes: torch has no read-only tensors.
            self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def read_tensor(
        self, *, start: int, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return the tensor that starts at byte `start`; row-major unless `strides` are given.

        The caller has checked that it lies inside the file.

        Memory: none where the tensor lies aligned to its elements, else a copy of it.
        """
        if not prod(shape):
            return torch.empty(tuple(shape), dtype=getattr(torch, dtype))
        if strides is None:
            strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        width = item_nbytes(dtype)
        span = count_span(shape, strides) * width
        raw = torch.frombuffer(self.buffer, dtype=torch.uint8, count=span, offset=start)
        if raw.data_ptr() % width:
            # Kernels may assume aligned elements.
            raw = raw.clone()
        return raw.view(getattr(torch, dtype)).as_strided(tuple(shape), tuple(strides))


def count_span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a non-empty strided tensor, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
