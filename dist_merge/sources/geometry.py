"""From placements on a mesh to a box of offsets + sizes. Pure numbers, no torch.

Source: torch's ceil-chunk rule for `Shard`, and the right-to-left order of `_StridedShard`
(FSDP2 over tensor parallelism, where the later mesh axis was split first).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..errors import SourceError


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies on one mesh axis; `dim` None means replicated."""

    dim: int | None = None
    split_factor: int | None = None


def chunk_range(length: int, *, parts: int, index: int) -> tuple[int, int]:
    """Offset and size of one part when `length` is cut in `parts`, each ceil(length/parts)."""
    step = -(-length // parts)
    start = min(index * step, length)
    return start, min(start + step, length) - start


def shard_box(
    shape: Sequence[int],
    *,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    shard_order: Mapping[int, Sequence[int]] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of the local shard at `coordinate`.

    Args:
        shape: Global shape.
        mesh_shape: Size of every mesh axis.
        coordinate: Position on the mesh.
        placements: One per mesh axis.
        shard_order: Tensor dim -> mesh axes in the order they split it, where the file says so.

    Raises:
        SourceError: Numbers that do not fit together.
    """
    if not len(mesh_shape) == len(coordinate) == len(placements) or not all(
        0 <= c < n for c, n in zip(coordinate, mesh_shape, strict=True)
    ):
        raise SourceError(
            "mesh-invalid",
            "mesh, coordinate and placements do not fit together",
            found=f"mesh {list(mesh_shape)}, coordinate {list(coordinate)}, "
            f"{len(placements)} placements",
        )
    offsets, sizes = [0] * len(shape), list(shape)
    for dim in {p.dim for p in placements if p.dim is not None}:
        if not 0 <= dim < len(shape):
            raise SourceError(
                "mesh-invalid", f"sharded on dim {dim}, the tensor has {len(shape)} dims"
            )
        for axis in choose_order(dim, placements, mesh_shape, shard_order):
            start, size = chunk_range(sizes[dim], parts=mesh_shape[axis], index=coordinate[axis])
            offsets[dim] += start
            sizes[dim] = size
    return tuple(offsets), tuple(sizes)


def choose_order(
    dim: int,
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    shard_order: Mapping[int, Sequence[int]] | None,
) -> list[int]:
    """Mesh axes that split `dim`, in the order they did.

    Plain shards split left to right. A strided shard was split after all later axes of its dim,
    which its split factor must confirm.
    """
    axes = [axis for axis, placement in enumerate(placements) if placement.dim == dim]
    order: list[int] = []
    for axis in reversed(axes):
        factor = placements[axis].split_factor
        later = prod(mesh_shape[a] for a in axes if a > axis)
        if factor is None or factor == 1:
            order.insert(0, axis)
        elif factor == later:
            order.append(axis)
        else:
            raise SourceError(
                "placement-unknown",
                f"a strided shard of dim {dim} has split factor {factor}",
                expected=f"{later}, the size of the later mesh axes that split this dim",
                hint="this layout is not supported; save with full or plain sharded state dict",
            )
    stated = list((shard_order or {}).get(dim, ()))
    if len(axes) > 1 and stated and stated != order:
        if any(placements[axis].split_factor not in (None, 1) for axis in axes):
            raise SourceError(
                "placement-unknown",
                f"strided placements and stated order of dim {dim} disagree",
                expected=str(order),
                found=str(stated),
            )
        if sorted(stated) != axes:
            raise SourceError("placement-unknown", f"bad shard order of dim {dim}: {stated}")
        return stated
    return order
