"""Read what a pickled device mesh says, from its instance dictionary alone.

Nothing here calls a method of the mesh: those may ask for a process group, or answer for the
reader's own. Layouts seen: torch 2.4-2.9 (`mesh` tensor), 2.10 (`_layout` of nested shapes and
strides), 2.11 and later (`_layout.axes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True)
class MeshView:
    """One rank's view of a mesh: `rank` is the training rank that stands at `coordinate`.

    `lines` are, per axis, the ranks one meets along it through `coordinate`. `coordinate` is None
    on a rank that is not on the mesh and so holds nothing of the tensor.
    """

    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    names: tuple[str, ...]
    rank: int | None
    lines: tuple[tuple[int, ...], ...] = ()

    def is_ascending(self, axis: int) -> bool:
        """Whether ranks ascend along an axis."""
        line = self.lines[axis]
        return line == tuple(sorted(line))


def read_mesh(mesh: Any) -> MeshView:
    """Read a mesh.

    Raises:
        KeyError, TypeError, AttributeError, ValueError, IndexError: It has another structure, or
            its parts contradict each other.
    """
    fields: Mapping[str, Any] = mesh.__dict__
    names = tuple(fields.get("mesh_dim_names") or fields.get("_mesh_dim_names") or ())
    if fields["_coordinate_on_dim"] is None:
        return MeshView((), None, names, fields.get("_rank"))
    coordinate = tuple(int(c) for c in fields["_coordinate_on_dim"])
    if "mesh" in fields:
        grid = fields["mesh"]
        shape = tuple(int(size) for size in grid.shape)
        rank = int(grid[coordinate])
        lines = [
            [int(grid[replace(coordinate, axis, index)]) for index in range(size)]
            for axis, size in enumerate(shape)
        ]
    else:
        axes = read_axes(fields["_layout"])
        shape = tuple(prod(size for size, _ in axis) for axis in axes)
        ranks = [int(rank) for rank in fields["_flatten_rank_map"]]
        position = find_position(fields, axes, coordinate, ranks)
        rank, start = ranks[position], position - measure(axes, coordinate)
        lines = [
            [ranks[start + measure(axes, replace(coordinate, axis, i))] for i in range(size)]
            for axis, size in enumerate(shape)
        ]
    return MeshView(shape, coordinate, names, rank, tuple(map(tuple, lines)))


def replace(coordinate: tuple[int, ...], axis: int, index: int) -> tuple[int, ...]:
    """Move along one axis."""
    return (*coordinate[:axis], index, *coordinate[axis + 1 :])


def find_position(
    fields: Mapping[str, Any],
    axes: list[list[tuple[int, int]]],
    coordinate: tuple[int, ...],
    ranks: list[int],
) -> int:
    """Position, in the list of ranks a mesh is laid over, of the rank at `coordinate`."""
    rank = fields.get("_rank")
    if prod(size for axis in axes for size, _ in axis) == len(ranks):
        position = measure(axes, coordinate)
    else:
        # A mesh sliced from a larger one: its layout tells distances, not where it begins.
        rank = int(read_mesh(fields["_root_mesh"]).rank or 0) if rank is None else int(rank)
        position = ranks.index(rank)
        if locate(axes, position) != coordinate:
            raise ValueError(f"rank {rank} does not stand at {list(coordinate)}")
    if rank is not None and int(rank) != ranks[position]:
        raise ValueError(f"rank {rank} does not stand at {list(coordinate)}")
    return position


def measure(axes: list[list[tuple[int, int]]], coordinate: tuple[int, ...]) -> int:
    """Distance of a coordinate from the mesh's first rank, in the list of ranks."""
    return sum(
        digit * stride
        for axis, index in zip(axes, coordinate, strict=True)
        for digit, stride in split_index(axis, index)
    )


def read_axes(layout: Any) -> list[list[tuple[int, int]]]:
    """Per mesh axis, its (size, stride) pairs; a flattened axis has several."""
    if hasattr(layout, "axes"):
        return [pair(axis.shape, axis.stride) for axis in layout.axes]
    shapes, strides = as_tuple(layout.shape), as_tuple(layout.stride)
    return [pair(size, stride) for size, stride in zip(shapes, strides, strict=True)]


def pair(shape: Any, stride: Any) -> list[tuple[int, int]]:
    """Pair the sizes and strides of one axis."""
    return [
        (int(size), int(step)) for size, step in zip(flatten(shape), flatten(stride), strict=True)
    ]


def flatten(value: Any) -> list[int]:
    """Numbers of a nested tuple."""
    return [n for part in as_tuple(value) for n in (flatten(part) if _is_nested(part) else [part])]


def split_index(axis: list[tuple[int, int]], index: int) -> list[tuple[int, int]]:
    """Split an index on an axis into (digit, stride) pairs."""
    digits = []
    for size, stride in reversed(axis):
        index, digit = divmod(index, size)
        digits.append((digit, stride))
    return digits


def locate(axes: list[list[tuple[int, int]]], position: int) -> tuple[int, ...]:
    """Coordinate of a position in the list of ranks."""
    coordinate = []
    for axis in axes:
        index = 0
        for size, stride in axis:
            index = index * size + (position // stride) % size if stride else index * size
        coordinate.append(index)
    return tuple(coordinate)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Make a tuple of one number or several."""
    return tuple(value) if _is_nested(value) else (value,)


def _is_nested(value: Any) -> bool:
    return isinstance(value, (tuple, list))
