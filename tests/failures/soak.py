"""Kill random ranks at random steps of real merges and check the promises after each.

    python -m tests.failures.soak --minutes 10 [--in-process] [--seed 1] [--world 2 4]

After every fault: the target is absent, or complete and passes its recheck; no process is left
after 15 s; the exit code says failure unless the target is there; the next run on the same target
clears what the dead one left, or refuses the complete target. Exits with 1 on any violation.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dist_merge import MergeError, ModelMergerConfig, merge_model, validate_artifact
from tests.helpers.launch import torchrun
from tests.helpers.tiny_models import build_pipeline

from .jobs import Ended, Launcher
from .points import SIGNALS, SPOTS, Fault

MAX_SECONDS = 15.0


@dataclass(frozen=True)
class Lab:
    """What is merged."""

    actor: Path
    base: Path

    def arguments(self, target: Path) -> list[object]:
        """A merge in many buckets."""
        return [
            "merge", "--local_dir", self.actor, "--base_model", self.base,
            "--target_dir", target, "--trust-checkpoint", "--buffer-size", "30000",
            "--timeout", "60", "--quiet",
        ]  # fmt: skip

    def merge_alone(self, target: Path) -> None:
        """Merge in this process."""
        config = ModelMergerConfig(
            local_dir=self.actor,
            base_model=self.base,
            target_dir=target,
            trust_checkpoint=True,
            quiet=True,
        )
        merge_model(config)


def make_lab(root: Path) -> Lab:
    """Train the tiny model for one step on two ranks."""
    base = build_pipeline(root / "base")
    done = torchrun(
        "tests.helpers.train_fsdp", ["--pipeline", base, "--out", root / "run"], nproc=2
    )
    if done.code:
        raise RuntimeError(done.stderr)
    return Lab(root / "run" / "actor", base)


@dataclass(frozen=True)
class Trial:
    """One fault in a job of `size` ranks."""

    fault: Fault
    size: int
    holds_store: bool


def draw_trials(seed: int, *, worlds: Sequence[int]) -> Iterator[Trial]:
    """All combinations of kind, step and who, shuffled, again and again; the rest is random."""
    dice = random.Random(seed)
    while True:
        places = [(k, s, who) for k in SIGNALS for s in SPOTS for who in (0, 1)]
        dice.shuffle(places)
        for kind, step, who in places:
            size = dice.choice(worlds)
            rank = dice.randrange(1, size) if who else 0
            call = dice.randint(1, SPOTS[step][who].calls)
            yield Trial(Fault(kind, step, rank, call), size, dice.random() < 0.7)


@dataclass
class Row:
    """Counts of one kind of fault at one step."""

    outcomes: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0


class Soak:
    """Runs trials and keeps the score."""

    def __init__(self, lab: Lab, launcher: Launcher, work: Path) -> None:
        self.lab = lab
        self.launcher = launcher
        self.work = work
        self.rows: dict[tuple[str, str, str], Row] = {}
        self.violations: list[str] = []

    def run(self, trial: Trial) -> None:
        """Run one job with its fault and judge it."""
        fault = trial.fault
        shutil.rmtree(self.work, ignore_errors=True)
        notes, folder = self.work / "notes", self.work / "parent"
        notes.mkdir(parents=True)
        folder.mkdir()
        target = folder / "out"
        ended = self.launcher.run(
            self.lab.arguments(target),
            size=trial.size,
            fault=fault,
            notes=notes,
            holds_store=trial.holds_store,
        )
        is_there = os.path.lexists(target)
        found = list(judge(trial, ended, target))
        found += self.run_again(target, is_there=is_there)
        for what in found:
            self.violations.append(f"{trial}: {what}\n{ended.log[-3000:]}")
            print(f"VIOLATION {trial}: {what}", file=sys.stderr, flush=True)
        key = (fault.kind, fault.step, "rank 0" if fault.rank == 0 else "others")
        row = self.rows.setdefault(key, Row())
        outcome = ("complete" if is_there else "absent") if ended.is_struck else "not reached"
        row.outcomes["violation" if found else outcome] += 1
        if ended.is_struck:
            row.worst = max(row.worst, ended.seconds)

    def run_again(self, target: Path, *, is_there: bool) -> Iterator[str]:
        """Merge to the same target once more."""
        try:
            self.lab.merge_alone(target)
            if is_there:
                yield "the next run changed a target that was there"
        except MergeError as error:
            if not (is_there and error.error_id == "target-exists"):
                yield f"the next run fails: {error}"
        if os.path.lexists(target):
            yield from check_complete(target)
        if os.listdir(target.parent) != [target.name]:
            yield f"left after the next run: {sorted(os.listdir(target.parent))}"

    def report(self) -> str:
        """The table."""
        lines = ["| fault | step | on | runs | absent | complete | not reached | worst s |"]
        lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
        steps = list(SPOTS)
        for key in sorted(self.rows, key=lambda k: (k[0], steps.index(k[1]), k[2])):
            row = self.rows[key]
            counts = [row.outcomes[name] for name in ("absent", "complete", "not reached")]
            cells = [*key, row.outcomes.total(), *counts, f"{row.worst:.1f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        total = sum(row.outcomes.total() for row in self.rows.values())
        worst = max((row.worst for row in self.rows.values()), default=0.0)
        lines.append(
            f"{total} faults, {len(self.violations)} violations, the slowest end {worst:.1f} s"
        )
        return "\n".join(lines)


def check_complete(target: Path) -> Iterator[str]:
    """Name what is wrong with a published folder."""
    try:
        validate_artifact(target)
    except (MergeError, OSError) as error:
        yield f"the target is not complete: {error}"


def may_publish(fault: Fault) -> bool:
    """Whether rank 0 may have renamed before it could know of the fault."""
    if fault.step == "after rename":
        return True
    # A dead rank takes part in no further agreement; a told one may, until it has been told.
    late = {"SIGKILL": ("before rename",), "SIGTERM": ("before rename", "finish")}[fault.kind]
    if fault.rank == 0:
        return fault.kind == "SIGTERM" and fault.step == "before rename"
    return fault.step in late


def judge(trial: Trial, ended: Ended, target: Path) -> Iterator[str]:
    """Name every promise that this job broke."""
    fault = trial.fault
    is_there = os.path.lexists(target)
    if None in ended.codes:
        yield f"the job did not end: {ended.codes}"
    if ended.alive:
        yield f"processes outlived the job: {ended.alive}"
    if ended.is_struck and ended.seconds > MAX_SECONDS:
        yield f"the job took {ended.seconds:.1f} s to end"
    if is_there:
        yield from check_complete(target)
        if ended.is_struck and not may_publish(fault):
            yield f"published after the fault: {ended.codes}"
    elif 0 in ended.codes:
        yield f"a rank says success and there is no target: {ended.codes}"
    if not ended.is_struck and any(ended.codes):
        yield f"failed without a fault: {ended.codes}"
    left = [name for name in os.listdir(target.parent) if name != target.name]
    if left and (fault.kind, fault.rank) != ("SIGKILL", 0):
        yield f"left in the folder: {left}"
    if any(not name.startswith(f".{target.name}.dist_merge-") for name in left):
        yield f"odd names in the folder: {left}"


def main() -> int:
    """Run trials until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--in-process", action="store_true", help="without torchrun: many more")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        root = Path(name)
        soak = Soak(make_lab(root), Launcher(is_in_process=options.in_process), root / "work")
        deadline = time.monotonic() + 60 * options.minutes
        for trial in draw_trials(options.seed, worlds=options.world):
            if time.monotonic() > deadline:
                break
            soak.run(trial)
    print(soak.report())
    for violation in soak.violations:
        print(f"VIOLATION {violation}")
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
