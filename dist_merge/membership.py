"""This process's place among the ranks of a run: from a trainer's group, a launcher, or alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from .errors import RequestError


@dataclass(frozen=True)
class Membership:
    """This process's place among the ranks of one run, and the store they share."""

    rank: int
    size: int
    store: Any


# Runs that this process took part in, by the ranks of the run.
_runs: dict[str, int] = {}


def join_ranks(process_group: Any = None, *, tag: str = "") -> Membership:
    """Take the next number of a run of these ranks; every rank counts its own calls.

    Calls with another `tag` are counted apart: a rank that missed the call for one target still
    meets the others at the next target, and never with tensors of another step.

    Inside an initialised process group (a trainer), its ranks take part through its store; no
    group of the trainer is used or made. Under torchrun without one, the launcher's store serves.
    Otherwise this is one process.

    Ranks: the same order of runs on all ranks; waits for nobody.
    """
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        if dist.get_rank() not in ranks:
            raise RequestError(
                "bad-option",
                "this rank is not in `process_group`",
                expected=f"a call on ranks {', '.join(map(str, ranks))} only",
                found=f"rank {dist.get_rank()}",
            )
        rank, size = ranks.index(dist.get_rank()), len(ranks)
        store = dist.distributed_c10d._get_default_store() if size > 1 else None
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=300)))
        ranks = list(range(size))
    else:
        store, rank, size, ranks = None, 0, 1, [0]
    if store is None:
        return Membership(rank, size, None)
    name = f"dist_merge/{'-'.join(map(str, ranks))}{tag}"
    number = _runs[name] = _runs.get(name, -1) + 1
    return Membership(rank, size, PrefixStore(f"{name}/{number}", store))


def local_rank() -> int:
    """Index of this process on its host, as the launcher says; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))
