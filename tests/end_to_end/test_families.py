"""Every family's transformer, trained under FSDP2, merged as a lone transformer and reloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dist_merge import ModelMergerConfig, merge_model
from tests.helpers.launch import torchrun
from tests.helpers.tiny_transformers import list_all, run_forward

FAMILIES = list_all()
# Name parts that the classes keep in fp32 under a 16-bit cast.
_WAN = ("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
ISLANDS = {
    "wan": _WAN,
    "wan_vace": _WAN,
    "wan_i2v_21": _WAN,
    "cosmos": ("learnable_pos_embed",),
    "kandinsky5": ("time_embeddings", "modulation", "visual_modulation", "text_modulation"),
    "minimax_h3": (
        "proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out", "rope",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all families in one torchrun start."""
    out = tmp_path_factory.mktemp("families")
    done = torchrun("tests.helpers.train_families", ["--out", out], nproc=2)
    assert done.code == 0, done.stderr
    return out


def merge(family: Path, target: Path, dtype: str) -> dict[str, torch.Tensor]:
    """Merge one family's run; returns the published tensors."""
    merge_model(
        ModelMergerConfig(
            local_dir=family / "actor",
            base_model=family / "base",
            target_dir=target,
            output_format="transformer",
            dtype=dtype,
            trust_checkpoint=True,
            quiet=True,
        )
    )
    manifest = json.loads((target / "merge_manifest.json").read_text())
    assert manifest["verification"]["model_class_check"] == "passed"
    assert manifest["verification"]["runtime"] == "passed"
    return load_file(target / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("name", FAMILIES)
def test_family_reloads_with_the_trained_weights(families: Path, tmp_path: Path, name: str) -> None:
    """Catches a family whose tensors are renamed, lost or reordered on the way."""
    import diffusers

    found = merge(families / name, tmp_path / "out", "preserve")
    reference = load_file(families / name / "reference.safetensors")
    assert set(found) == set(reference)
    for tensor_name, tensor in reference.items():
        assert torch.equal(found[tensor_name], tensor), tensor_name
    model_class = getattr(diffusers, FAMILIES[name].class_name)
    model, info = model_class.from_pretrained(str(tmp_path / "out"), output_loading_info=True)
    assert not any(info.values()), info
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # aligned, as in the run
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        outputs = run_forward(model, name)
    torch.set_num_threads(threads)
    trained = torch.load(families / name / "forward.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(outputs, trained, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_family_cast_keeps_fp32_islands(families: Path, tmp_path: Path, name: str) -> None:
    """Catches islands rounded to 16 bits, and tensors kept in fp32 that are no islands."""
    found = merge(families / name, tmp_path / "out", "bfloat16")
    words = ISLANDS.get(name, ())
    for tensor_name, tensor in load_file(families / name / "reference.safetensors").items():
        island = any(part in words for part in tensor_name.split("."))
        wanted = torch.float32 if island else torch.bfloat16
        assert found[tensor_name].dtype == wanted, tensor_name
        assert torch.equal(found[tensor_name], tensor.to(wanted)), tensor_name
