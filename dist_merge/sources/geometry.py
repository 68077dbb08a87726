"""From placements on a mesh to boxes of offsets + sizes. Pure numbers, no torch.

Source: torch's DTensor (`_utils.compute_local_shape_and_global_offset`, `_StridedShard`,
`DTensorSpec.shard_order`) and FSDP2 over tensor parallelism.

A strided shard can be read in two ways. As a *sequence*, it says which mesh axis split first: FSDP2
over tensor parallelism cuts like that, and every piece is one run of rows. As an *interleaving*,
torch cuts left to right and a piece may be several runs: `distribute_tensor` does that. Both agree
where sizes are even; elsewhere the sizes of the stored pieces tell: where two axes split a dim,
pieces read in the wrong way never tile the tensor, which the plan proves. Where three axes do, a
piece that fits both readings is refused, unless the user states the order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..errors import SourceError

RIGHT_TO_LEFT = "right-to-left"


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies on one mesh axis; `dim` None means replicated."""

    dim: int | None = None
    split_factor: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where one rank stands on the mesh and how the tensor is placed there.

    `shard_order` is tensor dim -> mesh axes in the order they split it, where the file says so.
    `is_interleaved` means that strided shards are never to be read as a sequence.
    `is_order_unknown` means that the writer could not have noted another order than left to right.
    `assumed_order` is the user's word on tensors of which nothing else tells.
    """

    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    placements: tuple[Placement, ...]
    shard_order: Mapping[int, Sequence[int]]
    is_interleaved: bool = False
    is_order_unknown: bool = False
    assumed_order: str | None = None


@dataclass(frozen=True, slots=True)
class Box:
    """One box of the tensor, and where it begins in the local piece."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


# Rows a piece holds along one dim, in the order they lie: (start, size).
Runs = tuple[tuple[int, int], ...]


def chunk_range(length: int, *, parts: int, index: int) -> tuple[int, int]:
    """Offset and size of one part when `length` is cut in `parts`, each ceil(length/parts)."""
    step = -(-length // parts)
    start = min(index * step, length)
    return start, min(start + step, length) - start


def locate_boxes(
    shape: Sequence[int], *, local_shape: Sequence[int], layout: Layout
) -> tuple[Box, ...]:
    """Return the boxes of a tensor of `shape` that a local piece of `local_shape` holds.

    Raises:
        SourceError: Numbers that do not fit together, or a piece of another size.
    """
    check_layout(shape, layout)
    candidates = [list_candidates(dim, length, layout) for dim, length in enumerate(shape)]
    chosen: list[Runs] = []
    for dim, options in enumerate(candidates):
        size = local_shape[dim] if len(local_shape) == len(shape) else -1
        fitting = [runs for runs in options if count(runs) == size]
        if not fitting:
            raise SourceError(
                "local-shard-size",
                "a local shard is not as large as its placement says",
                expected=str([count(options[0]) for options in candidates]),
                found=str(list(local_shape)),
                hint="the file is damaged or was edited",
            )
        chosen.append(choose_reading(dim, fitting, layout))
    return tuple(make_boxes(chosen))


def choose_reading(dim: int, fitting: Sequence[Runs], layout: Layout) -> Runs:
    """Choose between the sequence, which comes first, and the interleaving."""
    if len(set(fitting)) == 1 or count(fitting[0]) == 0:
        return fitting[0]
    splits = [axis for axis in list_axes(dim, layout) if layout.mesh_shape[axis] > 1]
    if len(splits) > 2 and layout.assumed_order is None:
        raise ambiguous(dim, layout, expected="a piece whose size fits one reading only")
    if len(splits) > 2 and layout.assumed_order != RIGHT_TO_LEFT:
        return fitting[1]
    return fitting[0]


def ambiguous(dim: int, layout: Layout, *, expected: str) -> SourceError:
    """Make the error for a tensor of which nothing tells which mesh axis split first."""
    splits = [
        f"Shard({p.dim})" if p.split_factor in (None, 1) else f"_StridedShard({p.split_factor})"
        for p in layout.placements
        if p.dim == dim
    ]
    return SourceError(
        "shard-order-ambiguous",
        f"{len(splits)} mesh axes split dim {dim}, and the file does not tell which did first",
        expected=expected,
        found=f"{', '.join(splits)} on a mesh of {list(layout.mesh_shape)}",
        hint="pass --assume-shard-order right-to-left for FSDP over tensor parallelism, "
        "left-to-right for tensors that one distribute_tensor call placed",
    )


def list_axes(dim: int, layout: Layout) -> list[int]:
    """Mesh axes that split `dim`."""
    return [axis for axis, placement in enumerate(layout.placements) if placement.dim == dim]


def check_layout(shape: Sequence[int], layout: Layout) -> None:
    """Check that mesh, coordinate, placements and shape fit together."""
    mesh_shape, coordinate = layout.mesh_shape, layout.coordinate
    if not len(mesh_shape) == len(coordinate) == len(layout.placements) or not all(
        0 <= c < n for c, n in zip(coordinate, mesh_shape, strict=True)
    ):
        raise SourceError(
            "mesh-invalid",
            "mesh, coordinate and placements do not fit together",
            found=f"mesh {list(mesh_shape)}, coordinate {list(coordinate)}, "
            f"{len(layout.placements)} placements",
        )
    for placement in layout.placements:
        if placement.dim is not None and not 0 <= placement.dim < len(shape):
            raise SourceError(
                "mesh-invalid", f"sharded on dim {placement.dim}, the tensor has {len(shape)} dims"
            )
        if placement.split_factor is not None and placement.split_factor < 1:
            raise SourceError("mesh-invalid", f"split factor {placement.split_factor}")


def list_candidates(dim: int, length: int, layout: Layout) -> list[Runs]:
    """Rows a piece may hold along `dim`, the likelier reading first."""
    axes = list_axes(dim, layout)
    is_strided = any(layout.placements[axis].split_factor not in (None, 1) for axis in axes)
    candidates = []
    if is_strided:
        order = None if layout.is_interleaved else decode_order(axes, layout)
        if order is not None:
            candidates.append(split_in_order(length, order, layout))
        candidates.append(interleave(length, axes, layout))
        return candidates
    order = list(layout.shard_order.get(dim, axes))
    if sorted(order) != axes:
        raise SourceError("placement-unknown", f"bad shard order of dim {dim}: {order}")
    if layout.is_order_unknown and sum(layout.mesh_shape[axis] > 1 for axis in axes) > 1:
        if layout.assumed_order is None:
            expected = "a strided placement, which the torch that saved this did not have"
            raise ambiguous(dim, layout, expected=expected)
        if layout.assumed_order == RIGHT_TO_LEFT:
            order = axes[::-1]
    return [split_in_order(length, order, layout)]


def decode_order(axes: Sequence[int], layout: Layout) -> list[int] | None:
    """Mesh axes in the order they split, or None where no order has these split factors.

    A split factor is the number of parts that later axes had made before this one split.
    """
    order: list[int] = []
    for axis in reversed(axes):
        factor = layout.placements[axis].split_factor or 1
        before = [prod(layout.mesh_shape[a] for a in order[:n]) for n in range(len(order) + 1)]
        if factor not in before:
            return None
        order.insert(before.index(factor), axis)
    return order


def split_in_order(length: int, order: Sequence[int], layout: Layout) -> Runs:
    """Rows left when the mesh axes split one after the other: always one run."""
    start, size = 0, length
    for axis in order:
        inner, size = chunk_range(
            size, parts=layout.mesh_shape[axis], index=layout.coordinate[axis]
        )
        start += inner
    return ((start, size),)


def interleave(length: int, axes: Sequence[int], layout: Layout) -> Runs:
    """Rows left when axes split left to right, a strided one taking a part of every section."""
    runs: Runs = ((0, length),)
    for axis in axes:
        parts, index = layout.mesh_shape[axis], layout.coordinate[axis]
        sections = layout.placements[axis].split_factor or 1
        total = count(runs)
        taken: list[tuple[int, int]] = []
        for section in range(sections):
            start, size = chunk_range(total, parts=sections, index=section)
            inner, size = chunk_range(size, parts=parts, index=index)
            taken += cut(runs, start + inner, size)
        runs = join(taken) or ((length, 0),)
    return runs


def count(runs: Runs) -> int:
    """Number of rows."""
    return sum(size for _, size in runs)


def cut(runs: Runs, start: int, size: int) -> list[tuple[int, int]]:
    """Rows `start` to `start + size` of the concatenated runs."""
    taken, position = [], 0
    for first, length in runs:
        low, high = max(start - position, 0), min(start + size - position, length)
        if low < high:
            taken.append((first + low, high - low))
        position += length
    return taken


def join(runs: Sequence[tuple[int, int]]) -> Runs:
    """Join runs that follow each other."""
    joined: list[tuple[int, int]] = []
    for start, size in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return tuple(joined)


def make_boxes(runs_by_dim: Sequence[Runs]) -> list[Box]:
    """Every combination of one run per dim."""
    placed = []
    for runs in runs_by_dim:
        ends = itertools.accumulate(size for _, size in runs)
        placed.append([(s, n, end - n) for (s, n), end in zip(runs, ends, strict=True)])
    boxes = []
    for parts in itertools.product(*placed):
        offsets, sizes, local_offsets = zip(*parts, strict=True) if parts else ((), (), ())
        boxes.append(Box(offsets, sizes, local_offsets))
    return boxes
