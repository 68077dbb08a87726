"""Where a fault can strike inside a run: a step, on rank 0 or on another rank, at the n-th call.

`plant` wraps one function of the real program in this process, so that the process sends itself a
signal there. Nothing else about the run is changed.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AGREE = "dist_merge.group.Group:agree"


@dataclass(frozen=True)
class Spot:
    """One function; `step` is what the first argument of `agree` must be; `calls` bounds n."""

    function: str
    calls: int = 1
    step: str | None = None
    is_after: bool = False


# Step -> spot on rank 0, spot on every other rank.
SPOTS: dict[str, tuple[Spot, Spot]] = {
    "inspect": (
        Spot("dist_merge.run:read_base"),
        Spot("dist_merge.inspect_sources:encode_files"),
    ),
    "plan": (Spot("dist_merge.merge_job.Job:make_plan"),) * 2,
    "gather": (Spot("dist_merge.merge_shards:gather_bucket", calls=8),) * 2,
    "write": (
        Spot("dist_merge.write.ShardWriter:_write", calls=70),
        Spot("dist_merge.merge_shards:prepare_bucket", calls=8),
    ),
    "verify": (
        Spot("dist_merge.verify:verify_tensor", calls=70),
        Spot(AGREE, step="verify"),
    ),
    "package": (
        Spot("dist_merge.package:copy_file", calls=10),
        Spot(AGREE, step="package"),
    ),
    "finish": (Spot("dist_merge.finish:write_json"), Spot(AGREE, step="finish")),
    "before rename": (
        Spot("dist_merge.publish:rename_noreplace"),
        Spot(AGREE, step="publish"),
    ),
    "after rename": (
        Spot("dist_merge.publish:rename_noreplace", is_after=True),
        Spot(AGREE, step="end"),
    ),
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}


@dataclass(frozen=True)
class Fault:
    """One fault: `kind` is a signal's name, `rank` the process that meets it."""

    kind: str
    step: str
    rank: int
    call: int

    @property
    def spot(self) -> Spot:
        """Where it strikes."""
        return SPOTS[self.step][self.rank != 0]

    def encode(self) -> str:
        """As text, for an environment variable."""
        return f"{self.kind}/{self.step}/{self.rank}/{self.call}"

    @classmethod
    def decode(cls, text: str) -> Fault:
        """Read what `encode` wrote."""
        kind, step, rank, call = text.split("/")
        return cls(kind, step, int(rank), int(call))


def plant(fault: Fault, *, mark: Path) -> None:
    """Make this process meet the fault, if it is the one; `mark` appears when it strikes."""
    if os.environ.get("RANK", "0") != str(fault.rank):
        return
    place, _, name = fault.spot.function.partition(":")
    owner = find_owner(place)
    original = getattr(owner, name)
    calls = [0]

    def strike() -> None:
        mark.write_text(str(time.time()))
        os.kill(os.getpid(), SIGNALS[fault.kind])

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if fault.spot.step is not None and args[1] != fault.spot.step:
            return original(*args, **kwargs)
        calls[0] += 1
        is_here = calls[0] == fault.call
        if is_here and not fault.spot.is_after:
            strike()
        result = original(*args, **kwargs)
        if is_here and fault.spot.is_after:
            strike()
        return result

    setattr(owner, name, faulty)


def find_owner(place: str) -> Any:
    """The module, or the class in a module, with this dotted name."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError:
        module, _, name = place.rpartition(".")
        return getattr(importlib.import_module(module), name)
