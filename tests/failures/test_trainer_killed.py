"""A rank of a trainer dies inside `publish_model`: the others end soon, with the cause."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Lab
from tests.helpers.launch import ROOT, make_environment


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("step", ["before", "prepare_bucket", "gather_bucket"])
def test_killed_rank_of_a_trainer(lab: Lab, tmp_path: Path, step: str) -> None:
    """Catches survivors that hang without a launcher, and a target left behind."""
    port = free_port()
    head = [sys.executable, "-m", "tests.helpers.train_killed", str(lab.base), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [*head, str(rank), "3", str(port), step], env=make_environment(), cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]  # fmt: skip
    codes = [rank.wait(timeout=90) for rank in ranks]
    assert codes == [0, 0, -9]
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        wanted = "did not join" if step == "before" else "peer-died"
        assert wanted in seen["error"], seen
        assert "rank 2" in seen["error"]
        assert seen["seconds"] < 40
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.json", "1.json"]
