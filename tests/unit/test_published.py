"""Publishing without replacing, and the recheck of a published folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dist_merge import publish
from dist_merge.errors import ArtifactError, MergeError, TargetError
from dist_merge.files import sha256_file, write_json
from dist_merge.manifest import MANIFEST_NAME, make_manifest
from dist_merge.publish import Staging, clear_dead_stagings
from dist_merge.records import MergePlan, OutputShard, OutputTensor, TensorSpec
from dist_merge.validate import validate_artifact

WEIGHTS = "diffusion_pytorch_model.safetensors"


def make_published(folder: Path) -> Path:
    """A small published transformer."""
    folder.mkdir()
    save_file({"a": torch.arange(6.0)}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text('{"_class_name": "Tiny"}')
    tensor = OutputTensor("a", TensorSpec((6,), "float32"), None, ())
    plan = MergePlan(
        artifact_type="diffusers_transformer",
        architecture="TinyPipeline",
        tensor_directory=".",
        sources={},
        output_shards=(OutputShard(WEIGHTS, {"format": "pt"}, (tensor,)),),
        index_path=None,
        buckets=(),
        dtype_changes={},
    )
    names = (WEIGHTS, "config.json")
    manifest = make_manifest(
        plan=plan,
        backend="fsdp",
        dtype="preserve",
        max_shard_size_bytes=1,
        source_files={},
        base_files={},
        files={name: sha256_file(folder / name) for name in names},
        file_sizes={name: (folder / name).stat().st_size for name in names},
        source_model_config={"sha256": None, "logical_path": "huggingface/config.json"},
        trained_component="transformer",
        config_transform_files=[],
        left_out=[],
        checks={},
        versions={},
        dtype_changes={},
    )
    write_json(folder / MANIFEST_NAME, manifest)
    return folder


def test_recheck_finds_every_flipped_bit(tmp_path: Path) -> None:
    """Catches a recheck that reads only headers, or not every file."""
    folder = make_published(tmp_path / "out")
    assert validate_artifact(folder)["num_tensors"] == 1
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        # The producer's versions are free text; everything else in the manifest is checked.
        step = 1 if path.name != MANIFEST_NAME else len(content)
        for position in range(0, len(content), max(step, 7)):
            for bit in (0, 5):
                spoiled = bytearray(content)
                spoiled[position] ^= 1 << bit
                path.write_bytes(spoiled)
                with pytest.raises(MergeError):
                    validate_artifact(folder)
        path.write_bytes(content)
    validate_artifact(folder)


def test_recheck_finds_added_removed_renamed_and_linked_files(tmp_path: Path) -> None:
    """Catches a recheck that trusts the listing."""
    folder = make_published(tmp_path / "out")
    config = folder / "config.json"
    (folder / "more.txt").write_text("x")
    with pytest.raises(ArtifactError, match="file-extra"):
        validate_artifact(folder)
    (folder / "more.txt").unlink()
    config.rename(folder / "konfig.json")
    with pytest.raises(ArtifactError, match="file-missing"):
        validate_artifact(folder)
    (folder / "konfig.json").rename(tmp_path / "config.json")
    config.symlink_to(tmp_path / "config.json")
    with pytest.raises(ArtifactError, match="bad-entry"):
        validate_artifact(folder)


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "a/../../b", "a\\b"])
def test_recheck_reads_nothing_outside_the_folder(tmp_path: Path, path: str) -> None:
    """Catches a manifest that makes the recheck open other files."""
    folder = make_published(tmp_path / "out")
    data = json.loads((folder / MANIFEST_NAME).read_text())
    data["files"][path] = "0" * 64
    data["file_sizes"][path] = 1
    (folder / MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(ArtifactError, match="manifest-invalid"):
        validate_artifact(folder)


@pytest.mark.parametrize("has_noreplace", [True, False])
def test_publish_race_has_one_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_noreplace: bool
) -> None:
    """Catches a rename that replaces what another run published first."""
    if not has_noreplace:
        monkeypatch.setattr(publish, "rename_noreplace", lambda *_: errno.EINVAL)
    for number in range(20):
        target = tmp_path / f"out{number}"
        stagings = [Staging.create(target) for _ in range(4)]
        outcomes: list[object] = []

        def run(staging: Staging, index: int, outcomes: list[object] = outcomes) -> None:
            (staging.artifact_dir / "owner").write_text(str(index))
            try:
                staging.publish()
                outcomes.append(index)
            except TargetError as error:
                outcomes.append(error.error_id)
                staging.discard()

        threads = [threading.Thread(target=run, args=(s, i)) for i, s in enumerate(stagings)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert len(winners) == 1, outcomes
        assert outcomes.count("target-exists") == 3
        assert (target / "owner").read_text() == str(winners[0])
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_staging_of_a_dead_run_is_removed_of_another_host_named(tmp_path: Path) -> None:
    """Catches a cleanup that removes the folder of a living run, or leaves a dead one's."""
    target = tmp_path / "out"
    dead, foreign, alive = (Staging.create(target) for _ in range(3))
    for staging, change in ((dead, {"start": "1"}), (foreign, {"host": "elsewhere"})):
        note = staging.wrapper / publish.OWNER_NAME
        note.write_text(json.dumps({**json.loads(note.read_text()), **change}))
    notes = clear_dead_stagings(target)
    assert not dead.wrapper.exists()
    assert foreign.wrapper.exists()
    assert alive.wrapper.exists()
    assert any("removed" in note and dead.wrapper.name in note for note in notes)
    assert any("rm -r" in note and foreign.wrapper.name in note for note in notes)
    shutil.rmtree(foreign.wrapper)
    alive.discard()
    assert os.listdir(tmp_path) == []
