"""`publish_model` inside real training loops on four gloo ranks."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dist_merge import ModelMergerConfig, merge_model, validate_artifact
from tests.conftest import Lab
from tests.helpers.launch import torchrun
from tests.helpers.train_publish import FUSED, KINDS

SOURCE_FIELDS = ("backend", "source_files", "source_fingerprint", "source_model_config")


@pytest.fixture(scope="module")
def trained(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train and publish all kinds in one torchrun start."""
    out = tmp_path_factory.mktemp("publish")
    done = torchrun(
        "tests.helpers.train_publish",
        ["--base", lab.base, "--out", out, "--kinds", *KINDS, "state_dict", "faults"],
        nproc=4,
        timeout=400,
    )
    assert done.code == 0, done.stderr
    return out


def read_seen(trained: Path, kind: str) -> list[dict[str, Any]]:
    """What each rank saw."""
    return [json.loads((trained / f"{kind}_{rank}.json").read_text()) for rank in range(4)]


def read_manifest(folder: Path, *, drop: tuple[str, ...] = ()) -> dict[str, Any]:
    """The manifest without some fields."""
    data = json.loads((folder / "merge_manifest.json").read_text())
    if "lora_fusion" in data:
        # The live model's own config is a better record than any file.
        data["lora_fusion"].pop("source")
    return {name: value for name, value in data.items() if name not in drop}


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_if_nothing_happened(trained: Path, kind: str) -> None:
    """Catches a publish that touches parameters, optimizer, random state or modes."""
    for seen in read_seen(trained, kind):
        assert seen["same"]
        assert seen["published"] == seen["plain"]


@pytest.mark.parametrize("kind", KINDS)
def test_published_folder_equals_the_merge_of_rank_files(
    trained: Path, lab: Lab, tmp_path: Path, kind: str
) -> None:
    """Catches a live path that publishes other bytes than save and merge."""
    merge_model(
        ModelMergerConfig(
            local_dir=trained / kind / "actor",
            base_model=lab.base,
            target_dir=tmp_path / "merged",
            trust_checkpoint=True,
            fuse_lora=kind in FUSED,
            quiet=True,
        )
    )
    merged = tmp_path / "merged"
    names = sorted(p.relative_to(merged).as_posix() for p in merged.rglob("*") if p.is_file())
    names.remove("merge_manifest.json")
    for live in (trained / kind / "live", trained / kind / "async"):
        assert len(names) + 1 == sum(p.is_file() for p in live.rglob("*"))
        _, mismatch, errors = filecmp.cmpfiles(merged, live, names, shallow=False)
        assert (mismatch, errors) == ([], [])
        assert read_manifest(live, drop=SOURCE_FIELDS) == read_manifest(merged, drop=SOURCE_FIELDS)
        assert read_manifest(live)["backend"] == "live"
        validate_artifact(live)


def test_published_pipeline_loads(trained: Path) -> None:
    """Catches a folder that only looks complete."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(str(trained / "fsdp1" / "live"))
    weights = "transformer/diffusion_pytorch_model.safetensors"
    published = load_file(trained / "fsdp1" / "live" / weights)
    for name, tensor in pipeline.transformer.state_dict().items():
        assert torch.equal(tensor, published[name])


def test_state_dict_and_subgroup(trained: Path) -> None:
    """Catches a call that needs ranks outside its group."""
    seen = read_seen(trained, "state_dict")
    assert (trained / "state_dict" / "state" / "merge_manifest.json").is_file()
    assert (trained / "state_dict" / "subgroup" / "merge_manifest.json").is_file()
    assert not (trained / "state_dict" / "no").exists()
    for rank in (0, 2):
        assert "not in `process_group`" in seen[rank]["outsider"]


def test_publishing_every_step_grows_nothing(trained: Path) -> None:
    """Catches leaked threads, descriptors, groups, store keys and memory over 20 publishes."""
    for seen in read_seen(trained, "state_dict"):
        first, last = seen["counts"][2], seen["counts"][-1]
        print(first, last)
        for name in ("threads", "os_threads", "files", "groups"):
            assert last[name] <= first[name], name
        assert last["keys"] <= first["keys"] + 4, "barriers leave a few keys at times"
        # A leak of one copy of the model would be 20 x 350 KiB.
        assert last["anonymous_kib"] - first["anonymous_kib"] < 2500


def test_a_failure_on_one_rank_reaches_all(trained: Path) -> None:
    """Catches a hang, several causes for one failure, a target left behind."""
    seen = read_seen(trained, "faults")
    for one in seen:
        assert "`proj_out.weight` is no tensor" in one["inside"]
        assert "rank 2" in one["inside"]
        assert "`proj_out.weight` is no tensor" in one["inside_async"]
        assert "rank 1 did not join within 6 s" in one["before"]
    assert not (trained / "faults" / "inside").exists()
    assert not (trained / "faults" / "before").exists()
    assert not [p for p in (trained / "faults").iterdir() if "dist_merge-" in p.name]


def test_async_publishes_what_was_there_at_the_call(trained: Path) -> None:
    """Catches parameters changed after the call that leak into the output."""
    weights = "diffusion_pytorch_model.safetensors"
    published = load_file(trained / "faults" / "mutated" / weights)
    assert not any(bool((tensor == 7.0).all()) for tensor in published.values())
    untouched = load_file(trained / "state_dict" / "step0" / weights)
    assert all(torch.equal(published[name], tensor) for name, tensor in untouched.items())
