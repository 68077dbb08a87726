"""Every file operation of a merge fails once, in every way that disks fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from dist_merge import MergeError, ModelMergerConfig, merge_model, publish, validate_artifact
from tests.conftest import Lab

from .faulty_files import ERRORS, SHORT, Faults, plant

pytestmark = pytest.mark.slow

EVERY_WRITE = bool(os.environ.get("DIST_MERGE_EVERY_WRITE"))


def merge(lab: Lab, target: Path) -> None:
    """Merge in this process."""
    merge_model(
        ModelMergerConfig(
            local_dir=lab.run() / "actor",
            base_model=lab.base,
            target_dir=target,
            trust_checkpoint=True,
            max_shard_size=200_000,
            quiet=True,
        )
    )


def judge(folder: Path, faults: Faults, error: MergeError | None) -> None:
    """Check the promises after one fault."""
    target, what = folder / "out", f"{faults.error} at {faults.log[-1]}: {error}"
    if faults.error == SHORT:
        assert error is None, what  # a short write is no error: the rest is written
    elif error is None:
        # Tidying up after the rename is tried again, and nobody's loss when it fails.
        assert faults.was_renamed, what
        assert ".dist_merge-" in faults.log[-1], what
    else:
        assert error.error_id == "io-error", what
        assert target.exists() == faults.was_renamed, what
        assert "complete" in str(error) if faults.was_renamed else True, what
    assert os.listdir(folder) == (["out"] if target.exists() else []), what
    if target.exists():
        validate_artifact(target)


def fail_once(lab: Lab, folder: Path, faults: Faults) -> bool:
    """Merge with one fault and judge; False when there was no such call."""
    folder.mkdir()
    raised = None
    try:
        with plant(faults):
            merge(lab, folder / "out")
    except MergeError as error:
        raised = error
    if faults.is_struck:
        judge(folder, faults, raised)
    else:
        assert raised is None, raised
    shutil.rmtree(folder)
    return faults.is_struck


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "mkdir"])
def test_each_call_fails_once(lab: Lab, tmp_path: Path, operation: str) -> None:
    """Catches a fault that is swallowed, not ours, or leaves a half-made or a staging folder."""
    errors = (*ERRORS, SHORT) if operation == "write" else ERRORS
    number, folder = 1, tmp_path / "parent"
    # Calls are many and alike: each meets one kind of fault, the kinds in turn.
    while fail_once(lab, folder, Faults(folder, operation, number, errors[number % len(errors)])):
        # Most writes are alike, one per tensor; the steps of 5 meet every kind of fault.
        number += 1 if operation != "write" or EVERY_WRITE else 5
    assert number > {"open": 20, "write": 80, "fsync": 20, "mkdir": 10}[operation]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("operation", "only", "has_noreplace"),
    [
        ("rename", "out", True),
        ("rename", "out", False),
        ("mkdir", "out", False),
        ("open", "owner.json", False),
        ("fsync", "owner.json", False),
        ("fsync", "parent", False),
    ],
)
def test_publishing_fails(
    lab: Lab, tmp_path: Path, operation: str, only: str, has_noreplace: bool, error: str
) -> None:
    """Catches a claimed but empty target, or a staging folder, after a failed publish."""
    folder, number = tmp_path / "parent", 1
    while fail_once(
        lab, folder, Faults(folder, operation, number, error, f"/{only}", has_noreplace)
    ):
        number += 1
    assert number > 1


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of its own of this size, where mounting is allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False, text=True)
    if mounted.returncode:
        pytest.skip(f"may not mount a small disk here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("nbytes", [8_192, 100_000, 300_000, 500_000])
def test_full_disk(lab: Lab, tmp_path: Path, nbytes: int, knows: bool) -> None:
    """Catches a half-made target on a disk that is too small, or turns out to be."""
    with small_disk(tmp_path / "disk", nbytes) as disk, ExitStack() as stack:
        if not knows:  # as with quotas and thin volumes: the free space is not to be had
            stack.enter_context(mock.patch.object(publish, "free_nbytes", return_value=10**12))
        with pytest.raises(MergeError) as caught:
            merge(lab, disk / "out")
        assert caught.value.error_id == ("disk-full" if knows else "io-error")
        assert "space" in str(caught.value)
        assert os.listdir(disk) == []


def test_read_only_disk(lab: Lab, tmp_path: Path) -> None:
    """Catches an unclear message, or writing elsewhere, where nothing can be written."""
    with small_disk(tmp_path / "disk", 8_000_000) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(MergeError, match="target-not-writable"):
            merge(lab, disk / "out")
        assert os.listdir(disk) == []


def test_read_only_folder(lab: Lab, tmp_path: Path) -> None:
    """Catches the same in a folder of a user who is not root."""
    folder = tmp_path / "parent"
    folder.mkdir(mode=0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write to read-only folders")
    with pytest.raises(MergeError, match="target-not-writable"):
        merge(lab, folder / "out")
    assert os.listdir(folder) == []
