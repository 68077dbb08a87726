"""Watching calls to a hub, with real files and threads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dist_merge.errors import UploadError
from dist_merge.hub import call_hub


def read_slowly(path: Path) -> int:
    """Read a file for about two seconds."""
    total = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(10):
            total += len(piece)
            time.sleep(0.2)
    return total


def test_call_that_reads_on_is_not_stalled(tmp_path: Path) -> None:
    """Catches a limit on the whole transfer instead of on silence, and unreported progress."""
    (tmp_path / "file").write_bytes(b"x" * 100)
    reports: list[None] = []
    found = call_hub(
        "sending",
        lambda: read_slowly(tmp_path / "file"),
        folder=tmp_path,
        timeout=1.0,
        on_progress=lambda: reports.append(None),
    )
    assert found == 100
    assert len(reports) > 3


def test_call_that_reads_elsewhere_is_stalled(tmp_path: Path) -> None:
    """Catches any open file taken for progress."""
    (tmp_path / "other").write_bytes(b"x" * 100)
    (tmp_path / "folder").mkdir()
    start = time.monotonic()
    with pytest.raises(UploadError, match="upload-stalled"):
        call_hub(
            "sending",
            lambda: read_slowly(tmp_path / "other"),
            folder=tmp_path / "folder",
            timeout=0.5,
        )
    assert time.monotonic() - start < 1.8


def test_call_given_up_by_its_caller_raises(tmp_path: Path) -> None:
    """Catches an upload that goes on although another rank has failed."""

    def stop() -> None:
        raise UploadError("upload-failed", "another rank failed")

    (tmp_path / "file").write_bytes(b"x" * 100)
    with pytest.raises(UploadError, match="another rank"):
        call_hub(
            "sending",
            lambda: read_slowly(tmp_path / "file"),
            folder=tmp_path,
            timeout=5.0,
            on_progress=stop,
        )
