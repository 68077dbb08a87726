"""The sources' half of the plan: boxes that tile every tensor, and who sends each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

from .errors import SourceError
from .records import DTYPES, LocalShard, PlannedBox, SourceTensor, TensorSpec, item_nbytes
from .tiling import check_tiling

# Expert weights and positions of the largest public models stay far below this.
MAX_DIMS = 16


def make_source_tensors(
    shards: Iterable[LocalShard], *, world_size: int, notes: list[str]
) -> dict[str, SourceTensor]:
    """Group local shards by tensor and prove that their boxes tile it exactly."""
    by_fqn: dict[str, list[LocalShard]] = defaultdict(list)
    for shard in shards:
        by_fqn[shard.fqn].append(shard)
    result: dict[str, SourceTensor] = {}
    sent: dict[int, int] = defaultdict(int)
    for fqn in sorted(by_fqn):
        group = sorted(by_fqn[fqn], key=lambda shard: (shard.offsets, shard.source_file))
        spec = check_agreement(fqn, group)
        holders = {shard.source_file for shard in group}
        if all(shard.is_whole_copy for shard in group) and len(holders) < world_size:
            notes.append(f"`{fqn}` is a plain tensor found in {len(holders)} of {world_size} files")
        boxes = choose_senders(group, sent=sent, nbytes=item_nbytes(spec.dtype))
        check_tiling(fqn, spec.shape, boxes)
        result[fqn] = SourceTensor(fqn, spec, boxes)
    return result


def check_agreement(fqn: str, group: Sequence[LocalShard]) -> TensorSpec:
    """Return the shape and dtype on which all files that hold `fqn` agree."""
    first = group[0]
    if len(first.global_shape) > MAX_DIMS or first.dtype not in DTYPES:
        raise SourceError(
            "dtype-unknown", f"tensor `{fqn}` cannot be stored", found=f"dtype {first.dtype}"
        )
    for shard in group:
        for what, here, there in (
            ("shape", list(first.global_shape), list(shard.global_shape)),
            ("dtype", first.dtype, shard.dtype),
        ):
            if here != there:
                raise SourceError(
                    f"{what}-disagrees",
                    f"tensor `{fqn}`: rank files disagree on its {what}",
                    where=f"`{shard.source_file}`",
                    expected=f"{here} as in `{first.source_file}`",
                    found=str(there),
                    hint="the files are from different runs or models; save the checkpoint again",
                )
    return TensorSpec(first.global_shape, first.dtype)


def choose_senders(
    group: Sequence[LocalShard], *, sent: dict[int, int], nbytes: int
) -> tuple[PlannedBox, ...]:
    """Make one box of equal local shards: one rank sends it, the others send digests.

    Rank 0's copy need not travel; among the others the rank with the least to send is taken.
    """
    copies: dict[tuple[tuple[int, ...], tuple[int, ...]], list[LocalShard]] = defaultdict(list)
    for shard in group:
        if prod(shard.sizes) > 0:
            copies[shard.offsets, shard.sizes].append(shard)
    boxes = []
    for (offsets, sizes), shards in sorted(copies.items()):
        chosen = min(
            shards,
            key=lambda s: (s.holder != 0, sent[s.holder], s.holder, s.source_file, s.source_key),
        )
        sent[chosen.holder] += prod(sizes) * nbytes
        replicas = tuple((s.holder, s.source_file, s.source_key) for s in shards if s is not chosen)
        boxes.append(
            PlannedBox(
                offsets, sizes, chosen.holder, chosen.source_file, chosen.source_key, replicas
            )
        )
    return tuple(boxes)
