"""Placements to boxes, against torch's own arithmetic and against FSDP2's way to cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dist_merge.errors import SourceError
from dist_merge.sources.geometry import (
    Box,
    Layout,
    Placement,
    chunk_range,
    decode_order,
    interleave,
    locate_boxes,
    split_in_order,
)
from dist_merge.sources.mesh import locate, read_mesh
from dist_merge.sources.pieces import read_placement


def make_layout(
    mesh: Sequence[int], coordinate: Sequence[int], *placements: Any, **more: Any
) -> Layout:
    return Layout(
        tuple(mesh),
        tuple(coordinate),
        tuple(read_placement(placement) for placement in placements),
        shard_order=more.pop("shard_order", {}),
        **more,
    )


def coordinates(mesh: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, mesh))


def split_by_torch(
    tensor: torch.Tensor, mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> torch.Tensor:
    """The piece `distribute_tensor` gives, made by torch's own splitting."""
    for size, index, placement in zip(mesh, coordinate, placements, strict=True):
        if not isinstance(placement, Replicate):
            pieces, _ = placement._split_tensor(tensor, size, with_padding=False)
            tensor = pieces[index]
    return tensor


def take(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


def lay(boxes: Sequence[Box], full: torch.Tensor, local_shape: Sequence[int]) -> torch.Tensor:
    """The piece that boxes describe, cut out of the full tensor."""
    piece = torch.full(tuple(local_shape), -1, dtype=full.dtype)
    for box in boxes:
        window = tuple(slice(o, o + n) for o, n in zip(box.local_offsets, box.sizes, strict=True))
        piece[window] = take(full, box)
    return piece


@pytest.mark.parametrize(
    ("length", "parts", "expected"),
    [
        (5, 2, [(0, 3), (3, 2)]),
        (5, 4, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (1, 2, [(0, 1), (1, 0)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_chunks_are_torchs(length: int, parts: int, expected: list[tuple[int, int]]) -> None:
    """Catches another rounding than torch.chunk's, and parts outside of the tensor."""
    assert [chunk_range(length, parts=parts, index=i) for i in range(parts)] == expected


@pytest.mark.parametrize(
    ("length", "expected"),
    [(10, [(0, 3), (5, 3), (3, 2), (8, 2)]), (7, [(0, 2), (4, 2), (2, 2), (6, 1)])],
)
def test_fsdp_over_tensor_parallelism(length: int, expected: list[tuple[int, int]]) -> None:
    """Catches pieces laid in rank order, which have the right size in the wrong place."""
    found = []
    for coordinate, (_, size) in zip(coordinates((2, 2)), expected, strict=True):
        layout = make_layout((2, 2), coordinate, _StridedShard(0, split_factor=2), Shard(0))
        (box,) = locate_boxes((length,), local_shape=(size,), layout=layout)
        found.append((box.offsets[0], box.sizes[0]))
    assert found == expected


def draw_placements(rng: random.Random, shape: Sequence[int], mesh: Sequence[int]) -> list[Any]:
    placements: list[Any] = []
    for _ in mesh:
        kind = rng.choice(["shard", "shard", "strided", "replicate"]) if shape else "replicate"
        dim = rng.randrange(len(shape)) if shape else 0
        factor = rng.choice([2, 2, 3, 4])
        placements.append(
            {
                "shard": Shard(dim),
                "strided": _StridedShard(dim, split_factor=factor),
                "replicate": Replicate(),
            }[kind]
        )
    return placements


@pytest.mark.parametrize("seed", range(300))
def test_any_placements_are_torchs(seed: int) -> None:
    """Catches offsets, sizes or row runs that differ from torch's for whatever placements."""
    rng = random.Random(seed)
    shape = tuple(rng.randrange(18) for _ in range(rng.randrange(4)))
    mesh = tuple(rng.choice([1, 2, 2, 3, 4]) for _ in range(rng.randint(1, 3)))
    placements = draw_placements(rng, shape, mesh)
    full = torch.arange(prod(shape)).view(shape)
    for coordinate in coordinates(mesh):
        piece = split_by_torch(full, mesh, coordinate, placements)
        size, offset = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), placements
        )
        assert tuple(piece.shape) == size
        layout = make_layout(mesh, coordinate, *placements, is_interleaved=True)
        boxes = locate_boxes(shape, local_shape=size, layout=layout)
        assert torch.equal(lay(boxes, full, size), piece), (shape, mesh, placements, coordinate)
        if piece.numel() and all(type(p) is Shard or type(p) is Replicate for p in placements):
            assert (boxes[0].offsets, len(boxes)) == (offset, 1)


def list_sequences(
    max_size: int, num_axes: int
) -> Iterator[tuple[tuple[int, ...], list[Placement]]]:
    """Every mesh, and every order in which its axes can split one dim, as strided placements."""
    for mesh in itertools.product(range(2, max_size), repeat=num_axes):
        for order in itertools.permutations(range(num_axes)):
            placements = [Placement()] * num_axes
            for number, axis in enumerate(order):
                factor = prod(mesh[a] for a in order[:number] if a > axis)
                placements[axis] = Placement(0, factor if factor > 1 else None)
            if any(p.split_factor for p in placements):
                yield mesh, placements


def expand(runs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(i for start, size in runs for i in range(start, start + size))


def test_readings_of_two_axes_never_tile_when_wrong() -> None:
    """Catches a way to read FSDP2's uneven pieces as `distribute_tensor`'s, or the other way.

    Whichever way a tensor was cut, each rank reads its piece by size alone: either the right rows
    come out on all ranks, or the pieces leave a hole, which the plan refuses.
    """
    num_uneven = 0
    for mesh, placements in list_sequences(6, 2):
        for length in range(60):
            true: dict[str, list[tuple[int, ...]]] = {"sequence": [], "interleaved": []}
            for coordinate in coordinates(mesh):
                layout = Layout(mesh, coordinate, tuple(placements), {})
                order = decode_order([0, 1], layout)
                assert order is not None
                true["sequence"].append(expand(split_in_order(length, order, layout)))
                true["interleaved"].append(expand(interleave(length, [0, 1], layout)))
            for cut in true.values():
                read = []
                for coordinate, rows in zip(coordinates(mesh), cut, strict=True):
                    layout = Layout(mesh, coordinate, tuple(placements), {})
                    boxes = locate_boxes((length,), local_shape=(len(rows),), layout=layout)
                    read.append(expand([(b.offsets[0], b.sizes[0]) for b in boxes]))
                if sorted(row for rows in read for row in rows) == list(range(length)):
                    assert read == cut, (mesh, placements, length)
                assert cut is not true["sequence"] or read == cut, "FSDP2 must always be read"
            num_uneven += true["sequence"] != true["interleaved"]
    assert num_uneven > 50


def test_three_strided_axes_are_refused_where_both_readings_fit() -> None:
    """Catches a guess where a piece's size leaves two places for it."""
    mesh, length, refused = (2, 3, 2), 15, 0
    placements = (
        _StridedShard(0, split_factor=6),
        _StridedShard(0, split_factor=2),
        Shard(0),
    )
    for coordinate in coordinates(mesh):
        plain = make_layout(mesh, coordinate, *placements)
        runs = {
            "right-to-left": split_in_order(length, [2, 1, 0], plain),
            "left-to-right": interleave(length, [0, 1, 2], plain),
        }
        for stated, expected in runs.items():
            layout = make_layout(mesh, coordinate, *placements, assumed_order=stated)
            size = sum(n for _, n in expected)
            boxes = locate_boxes((length,), local_shape=(size,), layout=layout)
            found = [(b.offsets[0], b.sizes[0]) for b in boxes]
            assert size == 0 or found == list(expected)
        if len(set(runs.values())) > 1 and len({sum(n for _, n in r) for r in runs.values()}) == 1:
            with pytest.raises(SourceError) as caught:
                locate_boxes((length,), local_shape=(size,), layout=plain)
            assert caught.value.error_id == "shard-order-ambiguous"
            assert "--assume-shard-order" in str(caught.value)
            assert "_StridedShard(6)" in str(caught.value)
            refused += 1
    assert refused > 0


def test_plain_double_shard_of_old_torch_needs_the_users_word() -> None:
    """Catches a left-to-right reading of FSDP over tensor parallelism."""
    arguments: dict[str, Any] = {"is_order_unknown": True}
    layout = make_layout((2, 2), (0, 1), Shard(0), Shard(0), **arguments)
    with pytest.raises(SourceError) as caught:
        locate_boxes((8,), local_shape=(2,), layout=layout)
    assert caught.value.error_id == "shard-order-ambiguous"
    for stated, start in (("left-to-right", 2), ("right-to-left", 4)):
        layout = make_layout((2, 2), (0, 1), Shard(0), Shard(0), assumed_order=stated, **arguments)
        (box,) = locate_boxes((8,), local_shape=(2,), layout=layout)
        assert box.offsets == (start,)
    # One axis of size 1 splits nothing: there is no question then.
    layout = make_layout((2, 1), (1, 0), Shard(0), Shard(0), **arguments)
    assert locate_boxes((8,), local_shape=(4,), layout=layout)[0].offsets == (4,)
    layout = make_layout((2, 2), (0, 1), Shard(0), Shard(1), **arguments)
    assert locate_boxes((8, 4), local_shape=(4, 2), layout=layout)[0].offsets == (0, 2)


def test_stated_order_is_followed() -> None:
    """Catches an order that a newer torch wrote down and that is ignored."""
    layout = make_layout((2, 2), (0, 1), Shard(0), Shard(0), shard_order={0: (1, 0)})
    assert locate_boxes((8,), local_shape=(2,), layout=layout)[0].offsets == (4,)


@pytest.mark.parametrize(
    ("layout", "shape", "local", "error_id"),
    [
        (make_layout((2,), (0,), Shard(0)), (5,), (2,), "local-shard-size"),
        (make_layout((2,), (0,), Shard(0)), (5,), (3, 1), "local-shard-size"),
        (make_layout((2,), (2,), Shard(0)), (5,), (3,), "mesh-invalid"),
        (make_layout((2, 2), (0,), Shard(0)), (5,), (3,), "mesh-invalid"),
        (make_layout((2,), (0,), Shard(1)), (5,), (3,), "mesh-invalid"),
        (make_layout((2,), (0,), Shard(0)), (), (), "mesh-invalid"),
        (Layout((2,), (0,), (Placement(0, 0),), {}), (5,), (3,), "mesh-invalid"),
        (
            make_layout((2, 2), (0, 0), Shard(0), Shard(0), shard_order={0: (1, 1)}),
            (8,),
            (2,),
            "placement-unknown",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    layout: Layout, shape: tuple[int, ...], local: tuple[int, ...], error_id: str
) -> None:
    """Catches a wrong claim that is computed with instead of refused."""
    with pytest.raises(SourceError) as caught:
        locate_boxes(shape, local_shape=local, layout=layout)
    assert caught.value.error_id == error_id


class OldMesh:
    """A mesh with the fields that torch 2.10 wrote, nested shapes included."""

    def __init__(self, shape: Any, stride: Any, coordinate: Any, **fields: Any) -> None:
        layout = type("Layout", (), {"shape": shape, "stride": stride})()
        self.__dict__.update(
            _layout=layout, _coordinate_on_dim=coordinate, _mesh_dim_names=("a", "b"), **fields
        )


def test_mesh_of_nested_layout_tells_its_rank() -> None:
    """Catches a flattened axis that is read as one stride, and a coordinate that lies."""
    ranks = tuple(range(100, 112))
    for coordinate in coordinates((6, 2)):
        mesh = OldMesh(((3, 2), 2), ((4, 1), 2), list(coordinate), _flatten_rank_map=ranks)
        view = read_mesh(mesh)
        first, second = divmod(coordinate[0], 2)
        assert view.shape == (6, 2)
        assert view.names == ("a", "b")
        assert view.rank == 100 + first * 4 + second + coordinate[1] * 2
        axes = [[(3, 4), (2, 1)], [(2, 2)]]
        assert locate(axes, view.rank - 100) == coordinate


def test_sliced_mesh_must_hold_its_rank_at_its_coordinate() -> None:
    """Catches a mesh whose rank and coordinate contradict each other."""
    good = OldMesh((2,), (2,), [1], _flatten_rank_map=(0, 1, 2, 3), _rank=3)
    assert read_mesh(good).rank == 3
    bad = OldMesh((2,), (2,), [0], _flatten_rank_map=(0, 1, 2, 3), _rank=3)
    with pytest.raises(ValueError, match="does not stand"):
        read_mesh(bad)
    whole = OldMesh((4,), (1,), [0], _flatten_rank_map=(0, 1, 2, 3), _rank=3)
    with pytest.raises(ValueError, match="does not stand"):
        read_mesh(whole)
