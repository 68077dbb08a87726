"""Two machines without a shared disk: two network namespaces, two torchrun agents, two folders."""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dist_merge import ModelMergerConfig, merge_model
from tests.conftest import Lab
from tests.helpers.launch import ROOT, Finished, make_environment

NAMES = ("dmhosta", "dmhostb")
ADDRESSES = ("10.77.31.1", "10.77.31.2")


def ip(*arguments: str) -> None:
    """Run one `ip` command."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def remove_network() -> None:
    """Remove both namespaces, and with them the veth pair."""
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """Two network namespaces joined by a veth pair."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2 (`ip`) for network namespaces")
    remove_network()
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "dmveth0", "netns", NAMES[0], "type", "veth",
           "peer", "name", "dmveth1", "netns", NAMES[1])  # fmt: skip
        for number, name in enumerate(NAMES):
            inside = ("netns", "exec", name, "ip")
            ip(*inside, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"dmveth{number}")
            ip(*inside, "link", "set", f"dmveth{number}", "up")
            ip(*inside, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        remove_network()
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode().strip()}")
    yield
    remove_network()


@dataclass
class Host:
    """One machine's agent."""

    process: subprocess.Popen[str]
    started: float

    def wait(self) -> Finished:
        """Wait for its end."""
        out, err = self.process.communicate(timeout=90)
        return Finished(self.process.returncode, out, err, time.monotonic() - self.started)


@contextlib.contextmanager
def start(
    number: int, port: int, *options: object, module: str = "dist_merge", mark: str = ""
) -> Iterator[Host]:
    """Start one machine's torchrun agent with one rank, under a host name of its own."""
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={number}",
        "--nproc_per_node=1", f"--master_addr={ADDRESSES[0]}", f"--master_port={port}",
        "-m", module, *map(str, options),
    ]  # fmt: skip
    script = f'hostname {NAMES[number]}; exec "$@"'
    inside = ["unshare", "--uts", "sh", "-c", script, "sh", *launcher]
    environment = {
        **make_environment(), "GLOO_SOCKET_IFNAME": f"dmveth{number}", "FAULT_MARK": mark,
    }  # fmt: skip
    process = subprocess.Popen(
        ["ip", "netns", "exec", NAMES[number], *inside], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield Host(process, time.monotonic())
    finally:
        kill_host(number)
        process.communicate(timeout=20)


def kill_host(number: int) -> None:
    """Kill everything that runs on one machine."""
    done = subprocess.run(
        ["ip", "netns", "pids", NAMES[number]], check=False, capture_output=True, text=True
    )
    for pid in done.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def split_actor(lab: Lab, folder: Path) -> tuple[Path, Path]:
    """The actor's two rank files on two machines; the config only on the first."""
    first = lab.copy_actor(folder / "first")
    second = folder / "second"
    second.mkdir()
    shutil.move(first / "model_world_size_2_rank_1.pt", second)
    return first, second


def merge_on_two(
    lab: Lab, first: Path, second: Path, target: Path, *, port: int, extra: tuple[str, ...] = ()
) -> tuple[Finished, Finished]:
    """Merge; the second machine has neither the base nor a place for the target."""
    common = ("--trust-checkpoint", "--quiet", *extra)
    here = ("merge", "--local_dir", first, "--base_model", lab.base, "--target_dir", target)
    there = (
        "merge",
        "--local_dir",
        second,
        "--base_model",
        "/no/base",
        "--target_dir",
        "/no/target/out",
    )
    with start(0, port, *here, *common) as one, start(1, port, *there, *common) as two:
        return one.wait(), two.wait()


def test_two_machines_equal_one(network: None, lab: Lab, tmp_path: Path) -> None:
    """Catches a rank that wants files it does not have, or a base on every machine."""
    first, second = split_actor(lab, tmp_path)
    one, two = merge_on_two(lab, first, second, tmp_path / "out", port=29811)
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    assert json.loads(one.stdout)["output_dir"] == str(tmp_path / "out")
    alone = tmp_path / "alone"
    merge_model(
        ModelMergerConfig(
            local_dir=lab.run() / "actor", base_model=lab.base, target_dir=alone,
            trust_checkpoint=True, quiet=True,
        )
    )  # fmt: skip
    names = sorted(p.relative_to(alone).as_posix() for p in alone.rglob("*") if p.is_file())
    _, mismatch, errors = filecmp.cmpfiles(alone, tmp_path / "out", names, shallow=False)
    assert (mismatch, errors) == ([], [])


def test_missing_file_is_listed_on_both(network: None, lab: Lab, tmp_path: Path) -> None:
    """Catches a merge of what is there, and a machine that is not told why."""
    first, second = split_actor(lab, tmp_path)
    (second / "model_world_size_2_rank_1.pt").rename(tmp_path / "away")
    # A file of another kind, so that the folder is not empty.
    (second / "optim_world_size_2_rank_1.pt").write_bytes(b"")
    one, two = merge_on_two(lab, first, second, tmp_path / "out", port=29812)
    for host in (one, two):
        assert host.code != 0
    assert "no file for rank 1" in one.stderr, one.stderr
    assert not (tmp_path / "out").exists()


def test_different_files_under_one_path(network: None, lab: Lab, tmp_path: Path) -> None:
    """Catches files of two steps mixed because their names and sizes are equal."""
    first, second = split_actor(lab, tmp_path)
    name = "model_world_size_2_rank_0.pt"
    other = lab.copy_actor(tmp_path / "other")
    content = bytearray((other / name).read_bytes())
    content[len(content) // 2] ^= 1
    (second / name).write_bytes(content)
    # torch writes checksums at the end of the file: a real other step differs there as well.
    spoiled = bytearray((second / name).read_bytes())
    spoiled[-2000] ^= 1
    (second / name).write_bytes(spoiled)
    one, _ = merge_on_two(lab, first, second, tmp_path / "out", port=29813)
    assert one.code != 0
    assert "source-disagrees" in one.stderr, one.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_machine_is_noticed(network: None, lab: Lab, tmp_path: Path, killed: int) -> None:
    """Catches a survivor that waits for a machine that is gone."""
    first, second = split_actor(lab, tmp_path)
    port, mark = 29814 + killed, tmp_path / "mark"
    fault = ("sleep", killed, 1, "merge", "--trust-checkpoint", "--quiet")
    here = ("--local_dir", first, "--base_model", lab.base, "--target_dir", tmp_path / "out")
    there = ("--local_dir", second, "--base_model", "/no/base", "--target_dir", "/no/target/out")
    options = {"module": "tests.helpers.faulty_cli", "mark": str(mark)}
    with (
        start(0, port, *fault, *here, **options) as one,
        start(1, port, *fault, *there, **options) as two,
    ):
        deadline = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < deadline, "the victim never reached a transfer"
            time.sleep(0.1)
        kill_host(killed)
        start_of_wait = time.monotonic()
        finished = (two if killed == 0 else one).wait()
        assert time.monotonic() - start_of_wait < 60
    assert finished.code != 0
    assert f"rank {killed}" in finished.stderr or "peer-lost" in finished.stderr, finished.stderr
    assert not (tmp_path / "out").exists()
    # Only the death of the publishing machine itself may leave a staging folder.
    assert killed == 0 or not list(tmp_path.glob(".out.dist_merge-*"))
