"""From a real FSDP2 run to a pipeline Diffusers opens, through the command line."""

from __future__ import annotations

import filecmp
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dist_merge import ModelMergerConfig, merge_model, validate_artifact
from tests.conftest import Lab
from tests.helpers.launch import python, torchrun
from tests.helpers.tiny_models import run_reloaded


def merge_arguments(lab: Lab, target: Path, *extra: object, dtype: str = "float32") -> list[object]:
    """Arguments of a merge of one of the lab's runs."""
    return [
        "merge", "--backend", "fsdp", "--local_dir", lab.run(dtype) / "actor",
        "--target_dir", target, "--base_model", lab.base, "--trust-checkpoint", *extra,
    ]  # fmt: skip


def list_tree(folder: Path) -> dict[str, bytes]:
    """Relative path -> content of every file."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.fixture(scope="module")
def merged(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fp32 run merged by one plain process."""
    target = tmp_path_factory.mktemp("merged") / "out"
    done = python("dist_merge", merge_arguments(lab, target))
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["output_dir"] == str(target)
    assert result["num_tensors"] == 77
    return target


@pytest.mark.parametrize("nproc", [2, 3, 4, 8])
def test_merge_any_number_of_processes_same_bytes(
    lab: Lab, merged: Path, tmp_path: Path, nproc: int
) -> None:
    """Catches bytes that depend on the number of ranks or on the buffer."""
    target = tmp_path / "out"
    extra = ["--buffer-size", "70000", "--quiet"]
    done = torchrun("dist_merge", merge_arguments(lab, target, *extra), nproc=nproc)
    assert done.code == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, "only rank 0 may print, and one line"
    assert list_tree(target) == list_tree(merged)


def test_merge_trained_weights_equal_full_tensor(lab: Lab, merged: Path) -> None:
    """Catches wrong rows, lost tensors, and the base published as the trained model."""
    from diffusers import QwenImagePipeline

    reference = load_file(lab.run() / "reference.safetensors")
    pipeline = QwenImagePipeline.from_pretrained(str(merged))
    state = pipeline.transformer.state_dict()
    assert set(state) == set(reference)
    for name, tensor in reference.items():
        assert torch.equal(state[name], tensor), name
    output = run_reloaded(pipeline.transformer)
    assert torch.equal(output, torch.load(lab.run() / "forward.pt", weights_only=True))
    base = load_file(lab.base / "transformer" / "diffusion_pytorch_model.safetensors")
    assert any(not torch.equal(base[name], reference[name]) for name in base)


def test_merge_frozen_files_byte_for_byte(lab: Lab, merged: Path) -> None:
    """Catches a frozen component that was re-saved or dropped."""
    new = {"transformer/diffusion_pytorch_model.safetensors"}
    base, output = list_tree(lab.base), list_tree(merged)
    assert set(output) == set(base) | {"merge_manifest.json"}
    edited = json.loads(output["merge_manifest.json"])["config_transform"]["files"]
    for name in set(base) - new - set(edited):
        assert output[name] == base[name], name


@pytest.mark.parametrize("dtype", ["bfloat16", "mixed"])
def test_merge_dtypes_preserved(lab: Lab, tmp_path: Path, dtype: str) -> None:
    """Catches a silent cast of checkpoints that are not fp32."""
    target = tmp_path / "out"
    config = ModelMergerConfig(
        local_dir=lab.run(dtype) / "actor",
        base_model=lab.base,
        target_dir=target,
        output_format="transformer",
        trust_checkpoint=True,
        max_shard_size="40KB",
        quiet=True,
    )
    result = merge_model(config)
    assert result.artifact_type == "diffusers_transformer"
    reference = load_file(lab.run(dtype) / "reference.safetensors")
    index = json.loads((target / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        found.update(load_file(target / name))
    assert set(found) == set(reference)
    for name, tensor in reference.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert validate_artifact(target)["num_tensors"] == 77


@pytest.mark.parametrize("dtype", ["base", "bfloat16", "float16"])
def test_merge_cast_rounds_once(lab: Lab, tmp_path: Path, dtype: str) -> None:
    """Catches a cast through another dtype, and `--dtype base` that ignores the base."""
    target = tmp_path / "out"
    merge_model(
        ModelMergerConfig(
            local_dir=lab.run("bfloat16" if dtype == "base" else "float32") / "actor",
            base_model=lab.base / "transformer",
            target_dir=target,
            output_format="transformer",
            dtype=dtype,
            trust_checkpoint=True,
            quiet=True,
        )
    )
    run = lab.run("bfloat16" if dtype == "base" else "float32")
    wanted = torch.float32 if dtype == "base" else getattr(torch, dtype)
    found = load_file(target / "diffusion_pytorch_model.safetensors")
    for name, tensor in load_file(run / "reference.safetensors").items():
        assert torch.equal(found[name], tensor.to(wanted)), name
        assert found[name].dtype == wanted


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_merge_any_world_size_same_weights(
    written: Path, lab: Lab, merged: Path, tmp_path: Path, size: int
) -> None:
    """Catches output that depends on how the training run was sharded."""
    target = tmp_path / "out"
    merge_model(
        ModelMergerConfig(
            local_dir=written / "resharded" / f"world_{size}" / "actor",
            base_model=lab.base,
            target_dir=target,
            trust_checkpoint=True,
            quiet=True,
        )
    )
    ours, theirs = list_tree(target), list_tree(merged)
    manifests = [json.loads(tree.pop("merge_manifest.json")) for tree in (ours, theirs)]
    assert ours == theirs
    for manifest in manifests:
        for field in [name for name in manifest if name.startswith("source_")]:
            del manifest[field]
    assert manifests[0] == manifests[1]


def test_merge_modes_from_umask(merged: Path) -> None:
    """Catches the 0600 files and 0700 folders that temporary-file helpers leave."""
    umask = os.umask(0)
    os.umask(umask)
    for path in [merged, *merged.rglob("*")]:
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_command_line_test_and_inspect(lab: Lab, merged: Path) -> None:
    """Catches a recheck that passes a damaged folder, and an inspect that moves tensors."""
    done = python("dist_merge", ["test", "--backend", "fsdp", "--test_hf_dir", merged])
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["num_tensors"] == 77
    arguments = ["inspect", "--local_dir", lab.run() / "actor", "--base_model", lab.base]
    done = python("dist_merge", [*arguments, "--trust-checkpoint", "--json"])
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["world_size"] == 2
    assert report["plan"]["num_tensors"] == 77
    done = python("dist_merge", [*arguments, "--trust-checkpoint"])
    assert "world size: 2" in done.stdout


def test_command_line_wrong_usage_exit_2(lab: Lab, tmp_path: Path) -> None:
    """Catches wrong options that end with the code of a failed merge, or with a traceback."""
    for arguments in (
        ["merge", "--local_dir", lab.base],
        merge_arguments(lab, tmp_path / "out", "--dtype", "int4"),
        merge_arguments(lab, tmp_path / "out", "--max_shard_size", "many"),
        merge_arguments(lab, tmp_path / "out", "--no-such-option"),
        [a for a in merge_arguments(lab, tmp_path / "out") if a != "--trust-checkpoint"],
    ):
        done = python("dist_merge", arguments)
        assert done.code == 2, done.stderr
        assert "Traceback" not in done.stderr
    assert "require explicit trust_checkpoint=True" in done.stderr
    assert os.listdir(tmp_path) == []


def test_merge_hub_cache_links_become_files(lab: Lab, tmp_path: Path) -> None:
    """Catches links published instead of files when the base lies in a hub cache."""
    base = lab.copy_base(tmp_path / "base")
    weights = base / "vae" / "diffusion_pytorch_model.safetensors"
    weights.rename(tmp_path / "blob")
    weights.symlink_to(tmp_path / "blob")
    target = tmp_path / "out"
    merge_model(
        ModelMergerConfig(
            local_dir=lab.run() / "actor",
            base_model=base,
            target_dir=target,
            trust_checkpoint=True,
            quiet=True,
        )
    )
    copy = target / "vae" / "diffusion_pytorch_model.safetensors"
    assert not copy.is_symlink()
    assert filecmp.cmp(copy, tmp_path / "blob", shallow=False)
