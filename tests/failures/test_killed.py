"""Ranks that die, stop or fail in the middle, under real torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import Lab
from tests.helpers.launch import ROOT, make_environment, python, torchrun, torchrun_command


def arguments(lab: Lab, target: Path) -> list[object]:
    """A merge in many buckets."""
    return [
        "merge", "--local_dir", lab.run() / "actor", "--base_model", lab.base,
        "--target_dir", target, "--trust-checkpoint", "--buffer-size", "30000",
    ]  # fmt: skip


# fault, rank, number of the call, what the output must name
FAULTS = [
    ("kill", 1, 3, "rank 1 ended without a word"),
    ("kill", 0, 3, "rank 0"),
    ("error", 1, 9, "Input/output error"),
    ("step-open-sources", 1, 1, "rank 1 ended without a word"),
    ("step-verify", 1, 1, "rank 1 ended without a word"),
    ("step-package", 0, 1, "rank 0"),
]


@pytest.mark.parametrize(("fault", "rank", "number", "named"), FAULTS)
def test_fault_under_torchrun_ends_all_and_leaves_nothing(
    lab: Lab, tmp_path: Path, fault: str, rank: int, number: int, named: str
) -> None:
    """Catches a dead or failing rank that hangs the others or leaves a half-made target."""
    target = tmp_path / "out"
    done = torchrun(
        "tests.helpers.faulty_cli",
        [fault, rank, number, *arguments(lab, target)],
        nproc=3,
        timeout=90,
    )
    assert done.code != 0
    assert named in done.stderr, done.stderr[-3000:]
    assert done.stdout == ""
    assert not target.exists()
    left = os.listdir(tmp_path)
    if rank == 0 and fault != "error":
        # A kill of the publishing process may leave its staging folder: the next run clears it.
        assert all(name.startswith(".out.dist_merge-") for name in left)
    else:
        assert left == []
    if left:
        again = python("dist_merge", arguments(lab, target))
        assert again.code == 0, again.stderr
        assert "removed the staging folder of a killed run" in again.stderr
        assert os.listdir(tmp_path) == ["out"]


def test_sigterm_during_a_transfer_ends_in_seconds(lab: Lab, tmp_path: Path) -> None:
    """Catches ranks that sit in a transfer deaf to SIGTERM until the launcher kills them."""
    target, mark = tmp_path / "out", tmp_path / "mark"
    command = torchrun_command(
        "tests.helpers.faulty_cli", ["sleep", 1, 3, *arguments(lab, target)], nproc=3
    )
    environment = {**make_environment(), "FAULT_MARK": str(mark)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE
    ) as job:
        deadline = time.monotonic() + 90
        while not mark.exists():
            assert time.monotonic() < deadline, "the fault was never reached"
            time.sleep(0.1)
        time.sleep(1)
        start = time.monotonic()
        job.send_signal(signal.SIGTERM)
        _, stderr = job.communicate(timeout=60)
        seconds = time.monotonic() - start
    assert job.returncode != 0
    assert "received SIGTERM" in stderr, stderr[-3000:]
    assert os.listdir(tmp_path) == ["mark"]
    # torchrun sends SIGKILL after 30 s; ours must have left before.
    assert seconds < 25, seconds
