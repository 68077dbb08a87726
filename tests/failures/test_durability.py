"""What the kernel is asked to flush, as strace sees it: everything before the rename, then it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import Lab
from tests.helpers.launch import run

pytestmark = pytest.mark.slow

CALL = re.compile(r"(\d+) +(fsync|fdatasync|write|renameat2|rename)\((.*)")
RESUMED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>.*= 0")
OPEN_FILE = re.compile(r"\d+<([^>]*)>")


@dataclass
class Trace:
    """Line numbers: of the last flush and the last write by path, and of the rename."""

    flushed: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    renamed: dict[str, int] = field(default_factory=dict)


def read_trace(text: str) -> Trace:
    """Read strace's lines; a flush counts when it has returned."""
    trace, waiting = Trace(), {}
    for number, line in enumerate(text.splitlines()):
        if match := RESUMED.match(line):
            if path := waiting.pop((match[1], match[2]), None):
                trace.flushed[path] = number
        elif match := CALL.match(line):
            pid, call, rest = match.groups()
            opened = OPEN_FILE.match(rest)
            if call.startswith("rename"):
                trace.renamed[rest] = number
            elif call == "write" and opened:
                trace.written[opened[1]] = number
            elif opened and "unfinished" in rest:
                waiting[pid, call] = opened[1]
            elif opened and rest.endswith("= 0"):
                trace.flushed[opened[1]] = number
    return trace


def test_everything_is_flushed_before_the_rename(lab: Lab, tmp_path: Path) -> None:
    """Catches a file or folder that a power cut after publishing would lose."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    folder, log = tmp_path / "parent", tmp_path / "trace"
    folder.mkdir()
    done = run(
        [
            "strace", "-f", "-y", "-s", "0", "-o", log,
            "-e", "trace=fsync,fdatasync,write,rename,renameat2",
            sys.executable, "-m", "dist_merge", "merge", "--local_dir", lab.run() / "actor",
            "--base_model", lab.base, "--target_dir", folder / "out", "--trust-checkpoint",
            "--max_shard_size", "100000", "--quiet",
        ]
    )  # fmt: skip
    if "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()[:200]}")
    assert done.code == 0, done.stderr
    trace = read_trace(log.read_text(errors="replace"))
    # strace abbreviates no path of a rename, and quotes it.
    (renamed,) = [n for rest, n in trace.renamed.items() if f'"{folder / "out"}"' in rest]
    staged = {path for path in trace.flushed if "/artifact" in path}
    (artifact,) = {path.partition("/artifact")[0] + "/artifact" for path in staged}
    for place, folders, files in os.walk(folder / "out"):
        relative = os.path.relpath(place, folder / "out")
        inside = artifact if relative == "." else f"{artifact}/{relative}"
        assert trace.flushed[inside] < renamed, f"folder {relative}"
        # Every entry was made, and flushed itself, before its folder was flushed.
        for name in (*files, *folders):
            assert trace.flushed[f"{inside}/{name}"] < trace.flushed[inside], name
        for name in files:
            written = trace.written[f"{inside}/{name}"]
            assert written < trace.flushed[f"{inside}/{name}"], name
    assert len(list((folder / "out").glob("transformer/*.safetensors"))) > 1
    assert trace.flushed[str(folder)] > renamed
