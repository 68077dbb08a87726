"""The scripts in `launch/`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = sorted(LAUNCH.iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_tells_its_usage_first(script: Path) -> None:
    """Catches a script that must be read whole before it can be run."""
    head = script.read_text(encoding="utf-8").splitlines()[:4]
    assert head[0] == "#!/usr/bin/env bash"
    assert any("Usage: " in line and script.name in line for line in head)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_is_sound(script: Path) -> None:
    """Catches a syntax error, and with shellcheck installed what it finds."""
    checks = [["bash", "-n", script]]
    if shutil.which("shellcheck"):
        checks.append(["shellcheck", script])
    for check in checks:
        done = subprocess.run(check, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("missing", ["NNODES", "NODE_RANK", "MASTER_ADDR"])
def test_multi_node_without_a_variable_names_it(missing: str) -> None:
    """Catches a machine that starts a job of its own because a variable was forgotten."""
    given = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "localhost"}
    done = subprocess.run(
        ["bash", LAUNCH / "multi_node.sh"],
        env={"PATH": "/usr/bin:/bin", **{k: v for k, v in given.items() if k != missing}},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert missing in done.stderr


def test_slurm_script_starts_one_agent_per_machine(tmp_path: Path) -> None:
    """Catches a lost option, a wrong first machine, a long list of machines that ends the script.

    Slurm's two commands and torchrun are stand-ins that show what they were given.
    """
    stand_ins = {
        "scontrol": "for n in $(seq 0 1999); do echo node$n; done",
        "srun": 'shift; for n in 0 1; do SLURM_NODEID=$n "$@"; done',
        "torchrun": "printf '%s|' \"$@\"; echo",
    }
    for name, script in stand_ins.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", LAUNCH / "slurm.sbatch", "--local_dir", "a folder"],
        env={
            "PATH": f"{tmp_path}{os.pathsep}/usr/bin:/bin", "SLURM_NNODES": "2000",
            "SLURM_JOB_NODELIST": "node[0-1999]", "NPROC": "3",
        },
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.splitlines() == [
        f"--nnodes=2000|--node_rank={number}|--master_addr=node0|--master_port=29500|"
        "--nproc_per_node=3|-m|dist_merge|merge|--local_dir|a folder|"
        for number in (0, 1)
    ]
