"""The checkpoint or the base changes while it is merged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from dist_merge import MergeError, ModelMergerConfig, merge_model
from dist_merge.merge_job import Job
from dist_merge.output_pipeline import OutputPipeline
from dist_merge.run import MergeRun
from tests.conftest import Lab

from .jobs import Launcher
from .points import Fault

RANK_FILE = "model_world_size_2_rank_1.pt"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
VOCABULARY = "tokenizer/vocab.json"


def rewrite(path: Path) -> None:
    """Save other values over a file, in place."""
    content = bytearray(path.read_bytes())
    for position in range(len(content) // 2, len(content) // 2 + 64):
        content[position] ^= 1
    with path.open("r+b") as file:
        file.write(content)


def move_time(path: Path) -> None:
    """Only the time differs: a save that wrote equal bytes."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def swap(path: Path) -> None:
    """Another file of the same size and time takes its place."""
    stat = path.stat()
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    rewrite(copy)
    os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    copy.rename(path)


def append(path: Path) -> None:
    """It grows."""
    with path.open("ab") as file:
        file.write(b"more")


def remove(path: Path) -> None:
    """It goes away; what is mapped stays readable."""
    path.unlink()


# Moments: after the inspection, before the last bucket is read, before the folder is finished.
MOMENTS: dict[str, tuple[type, str]] = {
    "plan": (Job, "make_plan"),
    "last bucket": (OutputPipeline, "put"),
    "package": (MergeRun, "package"),
}


@pytest.mark.parametrize("change", [rewrite, move_time, swap, append, remove])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", [RANK_FILE, WEIGHTS, VOCABULARY])
def test_changed_input_is_an_error(
    lab: Lab, tmp_path: Path, name: str, moment: str, change: Callable[[Path], None]
) -> None:
    """Catches an output of two steps, or one that its manifest does not describe."""
    actor, base = lab.copy_actor(tmp_path / "actor"), lab.copy_base(tmp_path / "base")
    path = (actor if name == RANK_FILE else base) / name
    owner, method = MOMENTS[moment]
    original = getattr(owner, method)
    calls = [0]

    def changed(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == (5 if moment == "last bucket" else 1):
            change(path)
        return original(*args, **kwargs)

    folder = tmp_path / "parent"
    folder.mkdir()
    config = ModelMergerConfig(
        local_dir=actor,
        base_model=base,
        target_dir=folder / "out",
        trust_checkpoint=True,
        buffer_size=60_000,
        quiet=True,
    )
    with mock.patch.object(owner, method, changed), pytest.raises(MergeError) as caught:
        merge_model(config)
    expected = {"source-changed"} if name == RANK_FILE else {"base-changed"}
    if change is remove:
        expected = {"io-error"}
    # Values that changed while they travelled are noticed as such, before the time of the file is.
    if name == RANK_FILE and change is rewrite:
        expected |= {"value-differs", "not-finite"}
    assert caught.value.error_id in expected, caught.value
    assert os.listdir(folder) == []


def test_file_cut_while_mapped_ends_the_job(lab: Lab, tmp_path: Path) -> None:
    """Catches a job that hangs on, or publishes, when a rank dies of SIGBUS."""
    actor = lab.copy_actor(tmp_path / "actor")
    notes, folder = tmp_path / "notes", tmp_path / "parent"
    notes.mkdir()
    folder.mkdir()
    with mock.patch.dict(os.environ, {"SOAK_FILE": str(actor / RANK_FILE)}):
        ended = Launcher(is_in_process=False).run(
            [
                "merge", "--local_dir", actor, "--base_model", lab.base,
                "--target_dir", folder / "out", "--trust-checkpoint", "--buffer-size", "30000",
            ],
            size=2,
            fault=Fault("CUT", "write", 1, 2),
            notes=notes,
        )  # fmt: skip
    assert ended.is_struck
    assert ended.codes == (1,)
    assert ended.seconds < 20, ended.seconds
    assert not ended.alive
    assert "rank 1 ended without a word" in ended.log, ended.log
    assert "SIGBUS" in ended.log, ended.log
    assert os.listdir(folder) == []
