"""Look at an adapter's values on rank 0 while they pass: can they be right, and did they matter?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..base_reader import BaseReader
from ..errors import VerificationError, make_list
from ..operations import evaluate, iter_contiguous
from ..records import AdapterPlan, MergePlan, OutputTensor
from .fold import unfold
from .keys import parse_key

# A run at more ranks leaves the same pattern at some smaller number.
MAX_WORLD_SIZE = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class AdapterWatch:
    """Collects what `finish` judges. Ranks: rank 0 only; memory: one bool per factor row."""

    plan: MergePlan
    adapter: AdapterPlan
    base: BaseReader | None = None
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    folded: dict[str, tuple[int, int]] = field(default_factory=dict)
    frozen_equal: int = 0
    frozen_different: int = 0

    def see_sources(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note which rows of the adapter's factors are exactly zero."""
        for fqn in set(tensors) & set(self.adapter.factors):
            tensor = tensors[fqn]
            if tensor.dim() > 1:
                self.rows[fqn] = tensor.flatten(1).eq(0).all(dim=1)

    def see_output(
        self, output: OutputTensor, result: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Compare a folded tensor with the unfolded one, a frozen one with the base's."""
        plain = unfold(output.expression)
        if plain != output.expression:
            before = evaluate(plain, tensors)
            self.folded[output.name] = (count_different(before, result), result.numel())
        elif self.base is not None and result.numel() > 1 and result.is_floating_point():
            same = self.base.read(output.name).to(result.dtype)
            if count_different(same, result, stop_at_first=True):
                self.frozen_different += 1
            else:
                self.frozen_equal += 1

    def finish(self, *, allow_zeros: bool) -> list[str]:
        """Judge; returns remarks for the log.

        Raises:
            VerificationError: One rank's rows are zero everywhere, or the fold changed nothing.
        """
        notes = []
        found = find_zero_blocks(self.rows)
        if found is not None:
            world_size, block, part = found
            text = (
                f"block {block} of {world_size} equal blocks of rows of `{part}` is exactly zero "
                f"in every module"
            )
            if not allow_zeros:
                raise VerificationError(
                    "adapter-zero-blocks",
                    f"adapter `{self.adapter.name}` seems to have lost rows: {text}",
                    expected="trained values in all rows",
                    hint=f"a save at world size {world_size} may have dropped a rank's rows; save "
                    "again, or pass --allow-suspicious-zeros if this is meant",
                )
            notes.append(f"accepted: {text}")
        if self.adapter.is_fused:
            notes.append(self.judge_fold())
        if self.frozen_different and not self.frozen_equal:
            notes.append(
                f"WARNING: all {self.frozen_different} weights that the adapter does not touch "
                f"differ from those of the base model: the run trained them too, or started from "
                f"another base"
            )
        return notes

    def judge_fold(self) -> str:
        """Check that the fold changed something, and say how much."""
        changed = {name for name, (count, _) in self.folded.items() if count}
        if not changed:
            raise VerificationError(
                "adapter-without-effect",
                f"folding adapter `{self.adapter.name}` changed no weight",
                expected="trained factors; an untrained B is zero",
                found=f"{len(self.folded)} tensors, equal before and after: "
                f"{make_list(self.folded, limit=3)}",
                hint="is this the right adapter and checkpoint? a change below the rounding of "
                "the output's dtype also vanishes: try --dtype float32",
            )
        elements = sum(count for count, _ in self.folded.values())
        total = sum(numel for _, numel in self.folded.values())
        return (
            f"the adapter changed {len(changed)} of {len(self.folded)} targeted tensors, "
            f"{elements} of {total} elements after rounding"
        )

    @property
    def counts(self) -> dict[str, int]:
        """What the manifest records of a fold."""
        return {
            "changed_tensors": sum(1 for count, _ in self.folded.values() if count),
            "changed_elements": sum(count for count, _ in self.folded.values()),
            "targeted_elements": sum(numel for _, numel in self.folded.values()),
        }


def count_different(one: torch.Tensor, two: torch.Tensor, *, stop_at_first: bool = False) -> int:
    """Count elements whose bits differ, in bounded memory."""
    kind = _INTEGERS[two.element_size()]
    count = 0
    for a, b in zip(iter_contiguous(one), iter_contiguous(two), strict=True):
        count += int(torch.count_nonzero(a.view(kind) != b.view(kind)))
        if count and stop_at_first:
            break
    return count


def find_zero_blocks(rows: Mapping[str, torch.Tensor]) -> tuple[int, int, str] | None:
    """Find a block of rows, cut as FSDP cuts, that is zero in every module's factor.

    Args:
        rows: FQN of a factor -> which of its rows are zero, [rows] bool.

    Returns:
        (number of blocks, index of the block, part of the adapter), or None. Factors that are
        zero as a whole are untrained and say nothing.
    """
    by_part: dict[str, list[torch.Tensor]] = {}
    for fqn, zero in rows.items():
        key = parse_key(fqn)
        if key is not None and not bool(zero.all()):
            by_part.setdefault(key.part, []).append(zero)
    for part, masks in sorted(by_part.items()):
        for world_size in range(2, MAX_WORLD_SIZE + 1):
            usable = [mask for mask in masks if len(mask) >= world_size]
            if not usable:
                break
            for block in range(world_size):
                pieces = [cut_block(mask, world_size=world_size, block=block) for mask in usable]
                filled = [piece for piece in pieces if len(piece)]
                # A single row of a single module may be dead.
                if sum(map(len, filled)) > 1 and all(bool(piece.all()) for piece in filled):
                    return world_size, block, part
    return None


def cut_block(mask: torch.Tensor, *, world_size: int, block: int) -> torch.Tensor:
    """A rank's rows of a factor; a late rank may have none."""
    size = -(-len(mask) // world_size)
    return mask[block * size : (block + 1) * size]
