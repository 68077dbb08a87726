"""Two machines without a shared disk: what each sees differs, the command is the same."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.tensor

from tests.conftest import Lab
from tests.helpers.launch import ROOT, Finished, run, torchrun
from tests.helpers.two_hosts import ADDRESSES, Host, NotAllowedError, open_hosts

PORTS = iter(range(29811, 29899))
SECONDS_TO_NOTICE = 20


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two machines, or the reason why there are none."""
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(open_hosts())
        except NotAllowedError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield pair


@dataclass
class Site:
    """Folders of one merge on two machines.

    Both call the checkpoint's folder `actor`; what it holds on the second machine lies in
    `second`. `only_first` is empty on the second: it has no base and no place for the target.
    """

    folder: Path
    hosts: tuple[Host, Host]

    def __post_init__(self) -> None:
        for path in (self.actor, self.second, self.only_first):
            path.mkdir(exist_ok=True)

    @property
    def actor(self) -> Path:
        return self.folder / "actor"

    @property
    def second(self) -> Path:
        return self.folder / "second"

    @property
    def only_first(self) -> Path:
        return self.folder / "only_first"

    @property
    def target(self) -> Path:
        return self.only_first / "out"

    @property
    def options(self) -> list[object]:
        """Options of the merge, the same on both machines."""
        return [
            "--local_dir", self.actor, "--base_model", self.only_first / "base",
            "--target_dir", self.target, "--trust-checkpoint", "--quiet",
        ]  # fmt: skip

    def start(self, stack: ExitStack, command: list[object], *, nproc: int, **more: str) -> list:
        """Start a command on both machines."""
        port = str(next(PORTS))
        mounts = (f"--bind {self.second} {self.actor}", f"-t tmpfs none {self.only_first}")
        jobs = []
        for host in self.hosts:
            environment = {
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "NNODES": "2", "NODE_RANK": str(host.number), "NPROC": str(nproc),
                "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": port, **more,
            }  # fmt: skip
            here = mounts if host.number == 1 else ()
            jobs.append(
                stack.enter_context(host.start(command, mounts=here, environment=environment))
            )
        return jobs

    def merge(self, *extra: object, nproc: int = 1) -> list[Finished]:
        """Merge with `launch/multi_node.sh` on both machines."""
        with ExitStack() as stack:
            command = ["bash", ROOT / "launch" / "multi_node.sh", *self.options, *extra]
            return [job.wait() for job in self.start(stack, command, nproc=nproc)]


@pytest.fixture
def site(hosts: tuple[Host, Host], lab: Lab, tmp_path: Path) -> Site:
    """The base on the first machine only, and its half of the rank files on each."""
    made = Site(tmp_path, hosts)
    shutil.copytree(lab.base, made.only_first / "base")
    shutil.copytree(lab.run() / "actor", made.actor, dirs_exist_ok=True)
    shutil.move(made.actor / "model_world_size_2_rank_1.pt", made.second)
    return made


def list_files(folder: Path) -> list[str]:
    """Relative paths of all files below a folder."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def check_equal(one: Path, other: Path) -> None:
    """Fail unless two folders hold the same files with the same bytes."""
    names = list_files(one)
    assert names
    assert names == list_files(other)
    _, mismatch, errors = filecmp.cmpfiles(one, other, names, shallow=False)
    assert (mismatch, errors) == ([], [])


def merge_alone(actor: Path, base: Path, target: Path, *extra: object) -> Path:
    """The same merge by one process, where everything lies on one disk."""
    options = ["--local_dir", actor, "--base_model", base, "--target_dir", target]
    done = run(
        [sys.executable, "-m", "dist_merge", "merge", *options, *extra,
         "--trust-checkpoint", "--quiet"]
    )  # fmt: skip
    assert done.code == 0, done.stderr
    return target


def test_two_machines_equal_one_process(site: Site, lab: Lab) -> None:
    """Catches a rank that wants files, a base or a target it does not have, or has no file."""
    one, two = site.merge(nproc=2)
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    assert json.loads(one.stdout)["output_dir"] == str(site.target)
    assert two.stdout == ""
    alone = merge_alone(lab.run() / "actor", lab.base, site.folder / "alone")
    check_equal(alone, site.target)
    assert list_files(site.second) == ["model_world_size_2_rank_1.pt"]


def test_dcp_folder_on_two_machines_equals_one_process(site: Site, lab: Lab) -> None:
    """Catches a DCP rank that looks for `.metadata` on its own disk; rank 0 has none here."""
    saves = site.folder / "saves"
    arguments = ["--pipeline", lab.base, "--out", saves, "--only", "rows"]
    done = torchrun("tests.helpers.train_dcp", arguments, nproc=2)
    assert done.code == 0, done.stderr
    step = saves / "rows" / "step-1"
    for folder, name in ((site.actor, "__0_0.distcp"), (site.second, "__1_0.distcp")):
        shutil.rmtree(folder)
        folder.mkdir()
        shutil.copy2(step / name, folder)
    shutil.copy2(step / ".metadata", site.second)
    config = ("--hf_model_config_path", lab.run() / "actor" / "huggingface")
    one, two = site.merge(*config)
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    check_equal(merge_alone(step, lab.base, site.folder / "alone", *config), site.target)


def test_missing_files_are_listed_as_ranges_on_both_machines(site: Site) -> None:
    """Catches a merge of what is there, and a machine that is not told why."""
    (site.actor / "model_world_size_2_rank_0.pt").rename(
        site.actor / "model_world_size_8_rank_0.pt"
    )
    (site.second / "model_world_size_2_rank_1.pt").rename(
        site.second / "model_world_size_8_rank_4.pt"
    )
    finished = site.merge()
    for host in finished:
        assert host.code != 0
        assert "no file for rank 1-3, 5-7" in host.stderr, host.stderr
    assert list_files(site.only_first / "base")
    assert not site.target.exists()


def test_two_steps_under_one_path_are_refused(site: Site) -> None:
    """Catches files of two steps mixed because their names and sizes are equal."""
    name = "model_world_size_2_rank_0.pt"
    state = torch.load(site.actor / name, weights_only=False)
    weight = next(v for v in state.values() if hasattr(v, "_local_tensor"))._local_tensor
    weight.detach().view(-1)[0] += 1e-3
    torch.save(state, site.second / name)
    times = (site.actor / name).stat().st_mtime_ns
    os.utime(site.second / name, ns=(times, times))
    assert (site.actor / name).stat().st_size == (site.second / name).stat().st_size
    for host in site.merge():
        assert host.code != 0
        assert "source-disagrees" in host.stderr, host.stderr
        assert name in host.stderr
    assert not site.target.exists()


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_machine_is_noticed(site: Site, killed: int) -> None:
    """Catches a survivor that waits for a machine that is gone."""
    mark = site.folder / "mark"
    command = [
        "torchrun", "--nnodes=2", "--nproc_per_node=1", "--master_addr", ADDRESSES[0],
    ]  # fmt: skip
    script = 'exec "$@" --node_rank="$NODE_RANK" --master_port="$MASTER_PORT" $FAULT'
    fault = ["-m", "tests.helpers.faulty_cli", "sleep", killed, 1, "merge", *site.options]
    with ExitStack() as stack:
        jobs = site.start(
            stack,
            ["bash", "-c", script, "bash", *command],
            nproc=1,
            FAULT_MARK=str(mark),
            FAULT=" ".join(map(str, fault)),
        )
        deadline = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < deadline, "the victim never reached a transfer"
            time.sleep(0.1)
        site.hosts[killed].kill()
        start = time.monotonic()
        finished = jobs[1 - killed].wait()
        seconds = time.monotonic() - start
    assert seconds < SECONDS_TO_NOTICE
    assert finished.code != 0
    assert f"rank {killed}" in finished.stderr or "peer-lost" in finished.stderr, finished.stderr
    assert not site.target.exists()
    # Only the death of the publishing machine itself may leave a staging folder.
    left = {path.name for path in site.only_first.iterdir()} - {"base"}
    assert killed == 0 or not left


def test_machine_without_the_folder_takes_part(lab: Lab, tmp_path: Path) -> None:
    """Catches a rank that opens a folder its machine does not have, whichever rank it is."""
    config = {
        "base_model": str(lab.base),
        "hf_model_config_path": str(lab.run() / "actor" / "huggingface"),
        "trust_checkpoint": True,
        "quiet": True,
    }
    cases = []
    for holder, backend in ((0, "auto"), (1, "fsdp"), (1, "auto"), (None, "fsdp")):
        name = f"{holder}-{backend}"
        if holder is not None:
            lab.copy_actor(tmp_path / name / f"disk{holder}")
        paths = {
            "local_dir": tmp_path / name / "disk{rank}",
            "target_dir": tmp_path / f"{name}-out",
        }
        texts = {key: str(path) for key, path in paths.items()}
        cases.append({"name": name, "config": {**config, **texts, "backend": backend}})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    (tmp_path / "seen").mkdir()
    done = torchrun(
        "tests.helpers.run_cases", [tmp_path / "cases.json", tmp_path / "seen"], nproc=2
    )
    assert done.code == 0, done.stderr
    seen = {
        case["name"]: [
            json.loads((tmp_path / "seen" / f"{case['name']}_{rank}.json").read_text())["error_id"]
            for rank in (0, 1)
        ]
        for case in cases
    }
    assert seen == {
        "0-auto": [None, None],
        "1-fsdp": [None, None],
        "1-auto": [None, None],
        "None-fsdp": ["local-dir-missing"] * 2,
    }
    for name in ("1-fsdp", "1-auto"):
        check_equal(tmp_path / "0-auto-out", tmp_path / f"{name}-out")
