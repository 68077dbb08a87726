"""Proof that boxes cover a tensor with no hole and no overlap."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .errors import SourceError, make_list
from .records import PlannedBox


def check_tiling(fqn: str, shape: tuple[int, ...], boxes: Sequence[PlannedBox]) -> None:
    """Prove that boxes cover a tensor of `shape` with no hole and no overlap."""
    for box in boxes:
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            start >= 0 and start + size <= length
            for start, size, length in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not inside:
            raise SourceError(
                "local-shard-outside",
                f"tensor `{fqn}`: a local shard lies outside the tensor",
                where=f"`{box.source_file}`",
                expected=f"within {list(shape)}",
                found=f"offsets {list(box.offsets)}, sizes {list(box.sizes)}",
            )
    first, second = find_overlap(boxes)
    if first is not None and second is not None:
        raise SourceError(
            "local-shard-overlap",
            f"tensor `{fqn}`: two local shards overlap",
            where=f"`{first.source_file}` and `{second.source_file}`",
            found=f"offsets {list(first.offsets)}, sizes {list(first.sizes)} and "
            f"offsets {list(second.offsets)}, sizes {list(second.sizes)}",
            hint="the files are from different runs; save the checkpoint again",
        )
    covered = sum(box.numel for box in boxes)
    if covered != prod(shape):
        files = make_list({box.source_file for box in boxes})
        raise SourceError(
            "local-shard-missing",
            f"tensor `{fqn}`: {prod(shape) - covered} of {prod(shape)} elements are in no file",
            where=f"found only in {files}" if files else None,
            expected=f"{list(shape)}",
            hint="pass the folder with all rank files, or save the checkpoint again",
        )


def find_overlap(boxes: Sequence[PlannedBox]) -> tuple[PlannedBox | None, PlannedBox | None]:
    """Return two boxes that overlap, or (None, None).

    Boxes are swept along the first dim; only those that are open at the same time are compared,
    which for row shards is one pair each.
    """
    if boxes and not boxes[0].sizes:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else (None, None)
    active: list[PlannedBox] = []
    for box in sorted(boxes, key=lambda b: b.offsets):
        active = [a for a in active if a.offsets[0] + a.sizes[0] > box.offsets[0]]
        for other in active:
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(
                    other.offsets, other.sizes, box.offsets, box.sizes, strict=True
                )
            ):
                return other, box
        active.append(box)
    return None, None
