"""Start real torchrun jobs from tests, with a hard time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """Outcome of a job."""

    code: int
    stdout: str
    stderr: str
    seconds: float


def make_environment() -> dict[str, str]:
    """Environment of a job: one thread per rank, no inherited launcher variables."""
    drop = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    kept = {k: v for k, v in os.environ.items() if k not in drop and "TORCHELASTIC" not in k}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def torchrun_command(module: str, arguments: Sequence[object], *, nproc: int) -> list[str]:
    """Command of a standalone torchrun job."""
    head = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*head, f"--nproc_per_node={nproc}", "-m", module, *map(str, arguments)]


def run(command: Sequence[object], *, timeout: float = 180) -> Finished:
    """Run a command to its end."""
    start = time.monotonic()
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=make_environment(),
        cwd=ROOT,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def torchrun(
    module: str, arguments: Sequence[object], *, nproc: int, timeout: float = 180
) -> Finished:
    """Run a module under torchrun."""
    return run(torchrun_command(module, arguments, nproc=nproc), timeout=timeout)


def python(module: str, arguments: Sequence[object], *, timeout: float = 180) -> Finished:
    """Run a module in one plain process."""
    return run([sys.executable, "-m", module, *arguments], timeout=timeout)
