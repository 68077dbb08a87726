"""Staging folder and publishing: the target appears complete, or not at all.

The staging folder lies next to the target and holds an owner note and the artifact. Publishing
renames the artifact onto the target without replacing anything.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import PeerError, TargetError
from .files import encode_json, fsync_dir, write_new_file
from .peers import process_identity, process_start

OWNER_NAME = "owner.json"
AT_FDCWD = -100
RENAME_NOREPLACE = 1
# What file systems and kernels answer that cannot rename without replacing.
NO_NOREPLACE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
# A rename that takes longer hangs in the file system; its staging folder is left to the next run.
RENAME_SECONDS = 10.0
# A run writes its note right after it made the folder; later there is nobody to write it.
NOTE_SECONDS = 60.0


def check_target(target: Path, *, inputs: Sequence[Path], needed_nbytes: int) -> None:
    """Refuse a target that exists, overlaps an input, or cannot hold the output.

    Raises:
        TargetError: With what is in the way.
    """
    if os.path.lexists(target):
        raise make_exists_error(target)
    parent = target.absolute().parent
    if not parent.is_dir():
        raise TargetError(
            "target-parent-missing",
            "the folder that should hold the target does not exist",
            where=f"`{parent}`",
            hint="create it first",
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise TargetError(
            "target-not-writable", "the target's parent is not writable", where=f"`{parent}`"
        )
    resolved = parent.resolve() / target.name
    for path in inputs:
        if is_overlap(resolved, path.resolve()):
            raise TargetError(
                "paths-overlap",
                "the target lies inside an input, or an input inside the target",
                where=f"`{target}` and `{path}`",
                hint="choose a target outside of the checkpoint and the base model",
            )
    available = free_nbytes(parent)
    if available < needed_nbytes:
        raise TargetError(
            "disk-full",
            "there is too little disk space for the output",
            where=f"`{parent}`",
            expected=f"{needed_nbytes} bytes",
            found=f"{available} bytes free",
            hint="free some space, or choose another disk",
        )


def check_inputs_apart(local_dir: Path, base_dir: Path) -> None:
    """Refuse a checkpoint inside the base, or the base inside the checkpoint.

    Raises:
        TargetError: They overlap.
    """
    if is_overlap(local_dir.resolve(), base_dir.resolve()):
        raise TargetError(
            "paths-overlap",
            "checkpoint and base model lie inside each other",
            where=f"`{local_dir}` and `{base_dir}`",
            hint="move the checkpoint out of the base model's folder",
        )


def is_overlap(first: Path, second: Path) -> bool:
    """Tell whether two resolved paths are equal or one holds the other."""
    return first == second or first in second.parents or second in first.parents


def free_nbytes(folder: Path) -> int:
    """Bytes an ordinary user may still write to the folder's file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def make_exists_error(target: Path) -> TargetError:
    """The error for a target that is already there."""
    return TargetError(
        "target-exists",
        "the target already exists; existing files are never changed",
        where=f"`{target}`",
        hint="choose another --target_dir, or remove that one yourself",
    )


class Staging:
    """An unpublished output folder; `artifact_dir` is what will become the target.

    `is_published` once the artifact is at the target, whatever fails after that. One thread may
    publish while another discards: whoever comes first, the artifact is never renamed in pieces.
    """

    def __init__(self, target: Path, wrapper: Path, owner: dict[str, Any]) -> None:
        self.target = target
        self.wrapper = wrapper
        self.artifact_dir = wrapper / "artifact"
        self.is_published = False
        self._owner = owner
        self._lock = threading.Lock()
        self._is_discarded = False

    @classmethod
    def create(cls, target: Path) -> Staging:
        """Make a staging folder next to the target.

        Raises:
            TargetError: The file system refused.
        """
        target = target.absolute()
        wrapper = target.parent / f"{_prefix(target)}{secrets.token_hex(6)}"
        owner = {**process_identity(), "claimed_target_inode": None}
        os.mkdir(wrapper)
        staging = cls(target, wrapper, owner)
        try:
            write_new_file(wrapper / OWNER_NAME, encode_json(owner))
            os.mkdir(staging.artifact_dir)
        except BaseException:
            staging.discard()
            raise
        return staging

    def publish(self, *, confirm: Callable[[], None] | None = None) -> None:
        """Flush all folders, then rename the artifact onto the target without replacing.

        Args:
            confirm: Called at the last moment; raises when the run was stopped.

        Raises:
            TargetError: Something appeared at the target meanwhile; it is left as it is.
            PeerError: The staging folder was discarded before.
        """
        for folder, _, _ in os.walk(self.artifact_dir, topdown=False, onerror=_raise):
            fsync_dir(Path(folder))
        with self._lock:
            if confirm is not None:
                confirm()
            if self._is_discarded:
                raise PeerError("interrupted", "the run was stopped before it could publish")
            self._rename()
            self.is_published = True
        fsync_dir(self.target.parent)
        self.discard()

    def _rename(self) -> None:
        code = rename_noreplace(self.artifact_dir, self.target)
        if code in NO_NOREPLACE:
            self._publish_onto_claim()
        elif code == errno.EEXIST:
            raise make_exists_error(self.target)
        elif code:
            raise OSError(code, os.strerror(code), str(self.target))

    def _publish_onto_claim(self) -> None:
        """Claim the name with an empty folder of our own, then rename onto that."""
        try:
            os.mkdir(self.target)
        except FileExistsError:
            raise make_exists_error(self.target) from None
        owner = {**self._owner, "claimed_target_inode": self.target.stat().st_ino}
        note = self.wrapper / OWNER_NAME
        try:
            note.unlink()
            write_new_file(note, encode_json(owner))
            os.rename(self.artifact_dir, self.target)
        except OSError as error:
            if self.artifact_dir.exists():
                with suppress(OSError):  # someone put something into it: theirs now
                    os.rmdir(self.target)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise make_exists_error(self.target) from error
            raise

    def discard(self) -> None:
        """Remove the staging folder; idempotent, never raises."""
        if not self._lock.acquire(timeout=RENAME_SECONDS):
            return
        try:
            self._is_discarded = True
            for _ in range(3):  # a thread that is being stopped may still create a file
                shutil.rmtree(self.wrapper, ignore_errors=True)
                if not os.path.lexists(self.wrapper):
                    return
        finally:
            self._lock.release()


def _raise(error: OSError) -> None:
    raise error


def _prefix(target: Path) -> str:
    return f".{target.name}.dist_merge-"


def clear_dead_stagings(target: Path) -> list[str]:
    """Remove staging folders of this target whose process is gone; name those of other hosts."""
    target = target.absolute()
    notes: list[str] = []
    here = process_identity()
    for wrapper in sorted(target.parent.glob(f"{glob.escape(_prefix(target))}*")):
        if wrapper.is_symlink() or not wrapper.is_dir():
            continue
        try:
            owner = json.loads((wrapper / OWNER_NAME).read_text(encoding="utf-8"))
            same = owner["host"] == here["host"] and owner["start"] is not None
            is_alive = same and process_start(owner["pid"]) == owner["start"]
        except (OSError, ValueError, KeyError, TypeError):
            same, is_alive, owner = False, False, {}
        if is_alive:
            continue
        if not same and not owner and is_barely_begun(wrapper):
            shutil.rmtree(wrapper, ignore_errors=True)
            notes.append(f"removed the staging folder of a killed run: {wrapper.name}")
            continue
        if not same:
            notes.append(f"a staging folder of another run is here; if it is dead: rm -r {wrapper}")
            continue
        claimed = owner.get("claimed_target_inode")
        is_claimed = claimed is not None and target.is_dir() and target.stat().st_ino == claimed
        if is_claimed and not any(target.iterdir()):
            target.rmdir()
        shutil.rmtree(wrapper, ignore_errors=True)
        notes.append(f"removed the staging folder of a killed run: {wrapper.name}")
    return notes


def is_barely_begun(wrapper: Path) -> bool:
    """Tell whether a staging folder is of a run that was killed before it wrote its note."""
    try:
        age = time.time() - wrapper.stat().st_mtime
        return age > NOTE_SECONDS and set(os.listdir(wrapper)) <= {OWNER_NAME}
    except OSError:
        return False


def rename_noreplace(source: Path, target: Path) -> int:
    """`renameat2(RENAME_NOREPLACE)`; returns 0 or the error number."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return errno.ENOSYS
    done = call(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE)
    return 0 if done == 0 else ctypes.get_errno()
