"""Others write to the same target, or appear at it, while a merge runs."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dist_merge import MergeError, ModelMergerConfig, merge_model, publish, validate_artifact
from dist_merge.errors import PeerError
from dist_merge.run import MergeRun
from tests.conftest import Lab

pytestmark = pytest.mark.slow

ROUNDS = 30
PATIENCE = 60


def make_config(lab: Lab, target: Path) -> ModelMergerConfig:
    """A merge to this target."""
    return ModelMergerConfig(
        local_dir=lab.run() / "actor",
        base_model=lab.base,
        target_dir=target,
        trust_checkpoint=True,
        quiet=True,
    )


def race(lab: Lab, root: Path, start: Any, meet: Any, answers: Any) -> None:
    """Merge to every target; in two of three rounds both racers meet right before the rename."""
    rename = publish.rename_noreplace
    for number in range(ROUNDS):

        def rename_together(source: Path, target: Path, number: int = number) -> int:
            if number % 3:
                meet.wait(PATIENCE)
            # In one of three rounds the file system knows no rename without replacing.
            return errno.EINVAL if number % 3 == 2 else rename(source, target)

        start.wait(PATIENCE)
        try:
            with mock.patch.object(publish, "rename_noreplace", rename_together):
                merge_model(make_config(lab, root / str(number) / "out"))
            answers.put((number, None))
        except MergeError as error:
            answers.put((number, error.error_id))


def test_two_mergers_one_target(lab: Lab, tmp_path: Path) -> None:
    """Catches two winners, no winner, or a winner whose folder the loser touched."""
    for number in range(ROUNDS):
        (tmp_path / str(number)).mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.failures.rank_process"])
    start, meet, answers = context.Barrier(2), context.Barrier(2), context.Queue()
    racers = [
        context.Process(target=race, args=(lab, tmp_path, start, meet, answers)) for _ in range(2)
    ]
    for racer in racers:
        racer.start()
    seen: dict[int, list[str | None]] = {}
    for _ in range(2 * ROUNDS):
        number, error_id = answers.get(timeout=PATIENCE)
        seen.setdefault(number, []).append(error_id)
    for racer in racers:
        racer.join(PATIENCE)
        assert racer.exitcode == 0
    for number in range(ROUNDS):
        assert sorted(seen[number], key=str) == [None, "target-exists"], (number, seen[number])
        assert os.listdir(tmp_path / str(number)) == ["out"]
        validate_artifact(tmp_path / str(number) / "out")


def make_file(target: Path) -> None:
    target.write_text("mine")


def make_folder(target: Path) -> None:
    target.mkdir()


def make_full_folder(target: Path) -> None:
    target.mkdir()
    (target / "mine").write_text("mine")


def make_dangling_link(target: Path) -> None:
    target.symlink_to("nowhere")


def make_link_to_folder(target: Path) -> None:
    (target.parent / "elsewhere").mkdir()
    target.symlink_to("elsewhere")


def list_all(folder: Path) -> list[tuple[str, int, bool]]:
    """Every entry below a folder with its inode, and whether it is a link."""
    return sorted((str(p), p.lstat().st_ino, p.is_symlink()) for p in folder.rglob("*"))


@pytest.mark.parametrize("has_noreplace", [True, False])
@pytest.mark.parametrize(
    "make", [make_file, make_folder, make_full_folder, make_dangling_link, make_link_to_folder]
)
def test_target_appears_during_the_merge(
    lab: Lab, tmp_path: Path, make: Callable[[Path], None], has_noreplace: bool
) -> None:
    """Catches what someone else put there being replaced, filled or removed."""
    target, before = tmp_path / "out", []
    original = MergeRun.publish

    def appear(run: MergeRun) -> None:
        make(target)
        before.extend(e for e in list_all(tmp_path) if ".dist_merge-" not in e[0])
        original(run)

    rename = publish.rename_noreplace if has_noreplace else lambda *_: errno.EINVAL
    with (
        mock.patch.object(MergeRun, "publish", appear),
        mock.patch.object(publish, "rename_noreplace", rename),
        pytest.raises(MergeError, match="target-exists"),
    ):
        merge_model(make_config(lab, target))
    assert before
    assert list_all(tmp_path) == before


def test_claimed_folder_is_filled_by_someone_else(lab: Lab, tmp_path: Path) -> None:
    """Catches another's file being lost where the target must be claimed first."""
    target = tmp_path / "out"
    original = publish.write_new_file

    def fill(path: Path, content: bytes) -> None:
        if target.is_dir():
            (target / "mine").write_text("mine")
        original(path, content)

    with (
        mock.patch.object(publish, "write_new_file", fill),
        mock.patch.object(publish, "rename_noreplace", return_value=errno.EINVAL),
        pytest.raises(MergeError, match="target-exists"),
    ):
        merge_model(make_config(lab, target))
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(target) == ["mine"]


def test_clean_up_and_rename_exclude_each_other(tmp_path: Path) -> None:
    """Catches a half-removed folder that a late thread still renames onto the target."""
    target = tmp_path / "out"
    staging = publish.Staging.create(target)
    (staging.artifact_dir / "weights").write_text("x")
    entered, go_on = threading.Event(), threading.Event()
    rename = publish.rename_noreplace

    def slow(source: Path, destination: Path) -> int:
        entered.set()
        go_on.wait(PATIENCE)
        return rename(source, destination)

    with mock.patch.object(publish, "rename_noreplace", slow):
        publisher = threading.Thread(target=staging.publish)
        publisher.start()
        assert entered.wait(PATIENCE)
        cleaner = threading.Thread(target=staging.discard)
        cleaner.start()
        cleaner.join(0.3)
        assert (staging.artifact_dir / "weights").exists(), "removed while it is renamed"
        go_on.set()
        publisher.join()
        cleaner.join()
    assert os.listdir(target) == ["weights"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("moment", ["before", "at the end"])
def test_stopped_run_does_not_publish(tmp_path: Path, moment: str) -> None:
    """Catches a target that appears after the run has reported its failure."""
    target = tmp_path / "out"
    staging = publish.Staging.create(target)
    confirm = staging.discard if moment == "before" else None
    if confirm is not None:
        confirm()
        with pytest.raises(OSError, match="artifact"):
            staging.publish()
    else:

        def stopped() -> None:
            raise PeerError("peer-died", "rank 1 ended")

        with pytest.raises(PeerError, match="peer-died"):
            staging.publish(confirm=stopped)
        staging.discard()
    assert os.listdir(tmp_path) == []


def test_staging_killed_before_its_note_is_removed_when_old(tmp_path: Path) -> None:
    """Catches a folder that stays for ever, or one that a living run has just made."""
    old, new, full = (tmp_path / f".out.dist_merge-{name}" for name in ("old", "new", "full"))
    for folder in (old, new, full):
        folder.mkdir()
    (old / publish.OWNER_NAME).touch()
    (full / "artifact").mkdir()
    for folder in (old, full):
        os.utime(folder, (0, 0))
    notes = publish.clear_dead_stagings(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == [full.name, new.name]
    assert len(notes) == 3
