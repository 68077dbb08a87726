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
from typing import Any

import pytest
import torch
import torch.distributed.tensor

from dist_merge import ModelMergerConfig, merge_model
from tests.conftest import Lab
from tests.helpers.launch import ROOT, Finished, torchrun
from tests.helpers.two_hosts import ADDRESSES, Host, Job, NotAllowedError, open_hosts

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

    def start(
        self,
        stack: ExitStack,
        command: list[object],
        *,
        nproc: tuple[int, int] = (1, 1),
        **more: str,
    ) -> list[Job]:
        """Start a command on both machines."""
        port = str(next(PORTS))
        mounts = (f"--bind {self.second} {self.actor}", f"-t tmpfs none {self.only_first}")
        jobs = []
        for host in self.hosts:
            environment = {
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "NNODES": "2", "NODE_RANK": str(host.number), "NPROC": str(nproc[host.number]),
                "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": port, **more,
            }  # fmt: skip
            here = mounts if host.number == 1 else ()
            jobs.append(
                stack.enter_context(host.start(command, mounts=here, environment=environment))
            )
        return jobs

    def merge(self, *extra: object, nproc: tuple[int, int] = (1, 1)) -> list[Finished]:
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


def merge_alone(actor: Path, base: Path, target: Path, **options: Any) -> Path:
    """The same merge by one process, where everything lies on one disk."""
    config = ModelMergerConfig(
        local_dir=actor, base_model=base, target_dir=target, trust_checkpoint=True, quiet=True,
        **options,
    )  # fmt: skip
    merge_model(config)
    return target


def test_two_machines_equal_one_process(site: Site, lab: Lab) -> None:
    """Catches a rank that wants files, a base or a target it does not have, or has no file."""
    one, two = site.merge(nproc=(2, 1))
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
    config = lab.run() / "actor" / "huggingface"
    one, two = site.merge("--hf_model_config_path", config)
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    alone = merge_alone(step, lab.base, site.folder / "alone", hf_model_config_path=config)
    check_equal(alone, site.target)


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


def save_other_step(actor: Path) -> None:
    """Change one number of rank 0's file; size and time stay as they are."""
    path = actor / "model_world_size_2_rank_0.pt"
    before = path.stat()
    state = torch.load(path, weights_only=False)
    weight = next(v for v in state.values() if hasattr(v, "_local_tensor"))._local_tensor
    weight.detach().view(-1)[0] += 1e-3
    torch.save(state, path)
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


# On which disks the checkpoint lies, the kind that is said, and what both ranks must see.
DISKS: dict[str, tuple[tuple[int, ...], str, str | None]] = {
    "first": ((0,), "auto", None),
    "second": ((1,), "fsdp", None),
    "second-auto": ((1,), "auto", None),
    "none": ((), "fsdp", "local-dir-missing"),
    "copies": ((0, 1), "auto", None),
    "two-steps": ((0, 1), "auto", "source-disagrees"),
}


def test_folder_on_either_disk_on_none_or_on_both(lab: Lab, tmp_path: Path) -> None:
    """Catches a rank that wants a folder its machine lacks, and two steps that are mixed.

    Two ranks with a folder each; no namespaces are needed for this.
    """
    cases = []
    for name, (disks, backend, _) in DISKS.items():
        for disk in disks:
            lab.copy_actor(tmp_path / name / f"disk{disk}")
        config = {
            "local_dir": str(tmp_path / name / "disk{rank}"),
            "target_dir": str(tmp_path / f"{name}-out"),
            "base_model": str(lab.base),
            "hf_model_config_path": str(lab.run() / "actor" / "huggingface"),
            "backend": backend,
            "trust_checkpoint": True,
            "quiet": True,
        }
        cases.append({"name": name, "config": config})
    save_other_step(tmp_path / "two-steps" / "disk1")
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    seen = tmp_path / "seen"
    seen.mkdir()
    done = torchrun("tests.helpers.run_cases", [tmp_path / "cases.json", seen], nproc=2)
    assert done.code == 0, done.stderr
    for name, (_, _, error_id) in DISKS.items():
        ranks = [json.loads((seen / f"{name}_{rank}.json").read_text()) for rank in (0, 1)]
        assert [rank["error_id"] for rank in ranks] == [error_id] * 2, (name, ranks)
        if error_id is None:
            check_equal(tmp_path / "first-out", tmp_path / f"{name}-out")
        else:
            assert not (tmp_path / f"{name}-out").exists()
    text = json.loads((seen / "two-steps_1.json").read_text())["text"]
    assert "`model_world_size_2_rank_0.pt` differs between machines" in text
