"""LoRA adapters of real FSDP2 runs, folded and exported, judged by PEFT and Diffusers."""

from __future__ import annotations

import filecmp
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dist_merge import MergeResult, ModelMergerConfig, merge_model, validate_artifact
from tests.conftest import Lab
from tests.helpers.launch import ROOT, make_environment, torchrun
from tests.helpers.train_lora import CASES, FAMILIES, build, forward
from tests.unit.test_minimax_h3 import base_dir, make_sources  # noqa: F401

VARIANTS = [name for name in CASES if name not in FAMILIES and name not in ("bfloat16", "names")]
# What a save of LoRA tensors only makes useless; its refusal is in test_lora_refusals.
LOSES_TENSORS = {"modules_to_save", "bias_all", "pissa", "olora"}
# PEFT folds convolutions with kernels whose sums run in another order; the last bit differs.
CONVOLUTIONS = {"conv2d", "conv3d"}


def list_pairs(*cases: str) -> list[tuple[str, str]]:
    """Cases with the kinds of checkpoint that can be merged."""
    full = [(case, "full") for case in cases]
    return full + [(case, "lora_only") for case in cases if case not in LOSES_TENSORS]


def merge(folder: Path, target: Path, **options: Any) -> MergeResult:
    """Merge one case's checkpoint as a lone transformer."""
    config: dict[str, Any] = {
        "local_dir": folder,
        "base_model": folder.parent / "base",
        "target_dir": target,
        "output_format": "transformer",
        "trust_checkpoint": True,
        "quiet": True,
    }
    return merge_model(ModelMergerConfig(**{**config, **options}))


def load(case: str, folder: Path) -> Any:
    """Load a published transformer with the arithmetic of the run."""
    cls = type(build(CASES[case].family))
    model, info = cls.from_pretrained(
        str(folder), output_loading_info=True, torch_dtype=CASES[case].dtype
    )
    assert not any(info.values()), info
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def run(model: Any, case: str) -> list[torch.Tensor]:
    """One forward pass without gradients."""
    with torch.no_grad():
        return forward(model, CASES[case].family)


def assert_close(outputs: list[torch.Tensor], path: Path, *, loose: bool = False) -> None:
    """Compare with outputs of the run; folding sums in another order than two products."""
    wanted = torch.load(path, weights_only=True)
    tolerance = 0.03 if loose else 1e-5
    for one, two in zip(outputs, wanted, strict=True):
        scale = float(two.float().abs().max())
        assert float((one.float() - two.float()).abs().max()) <= tolerance * scale


@pytest.mark.parametrize(("case", "kind"), list_pairs(*FAMILIES, "names", *VARIANTS))
def test_fuse_equals_peft(lora: Path, tmp_path: Path, case: str, kind: str) -> None:
    """Catches a wrong strength, a wrong adapter, a lost module, PEFT names in the output."""
    adapter = CASES[case].adapters[0]
    result = merge(
        lora / case / kind,
        tmp_path / "out",
        fuse_lora=True,
        adapter_name=adapter,
        lora_config=lora / case / "config",
    )
    found = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    wanted = load_file(lora / case / "merged.safetensors")
    assert set(found) == set(wanted)
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    if case in CONVOLUTIONS:
        assert all(torch.allclose(found[n], wanted[n], rtol=0, atol=3e-8) for n in different)
        different = [name for name in different if found[name].dim() < 4]
    assert different == []
    fusion = json.loads(Path(result.manifest_path).read_text())["lora_fusion"]
    assert fusion["adapter_name"] == adapter
    assert fusion["base_weights"] == {"full": "checkpoint", "lora_only": "base_model"}[kind]
    assert fusion["excluded_adapters"] == sorted(CASES[case].adapters[1:])
    assert fusion["changed_tensors"] >= len(fusion["fused_modules"])
    assert_close(run(load(case, tmp_path / "out"), case), lora / case / "forward.pt")
    validate_artifact(tmp_path / "out")


@pytest.mark.parametrize(("case", "kind"), list_pairs(*FAMILIES, "bfloat16", "names", *VARIANTS))
def test_export_loads_in_both_libraries(lora: Path, tmp_path: Path, case: str, kind: str) -> None:
    """Catches alpha = r, lost patterns, keys that a loader ignores without a word."""
    import peft

    adapter = CASES[case].adapters[0]
    result = merge(
        lora / case / kind,
        tmp_path / "out",
        adapter_name=adapter,
        lora_config=lora / case / "config",
    )
    folder = tmp_path / "out" / "lora_adapter"
    manifest = json.loads((folder / "merge_manifest.json").read_text())
    assert manifest["artifact_type"] == "peft_adapter"
    assert manifest["verification"]["runtime"] == "passed"
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] is None
    validate_artifact(tmp_path / "out")
    validate_artifact(folder)
    if kind == "full":
        assert any("NOT folded in" in note for note in result.notes)
        base = tmp_path / "out"
        plain = load_file(base / "diffusion_pytorch_model.safetensors")
        assert not any("lora" in name or "base_layer" in name for name in plain)
    else:
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["lora_adapter"]
        base = lora / case / "base"
    loose = CASES[case].dtype == torch.bfloat16
    wrapped = peft.PeftModel.from_pretrained(load(case, base), str(folder)).eval()
    assert_close(run(wrapped, case), lora / case / "forward.pt", loose=loose)
    model = load(case, base)
    if kind == "full" and not any(
        CASES[case].options.get(k) for k in ("init_lora_weights", "bias")
    ):
        # With the adapter off the published weights are those the adapter was trained on.
        assert_close(run(model, case), lora / case / "plain.pt")
    model.load_lora_adapter(str(folder), weight_name="pytorch_lora_weights.safetensors")
    assert_close(run(model, case), lora / case / "forward.pt", loose=loose)


def test_fuse_rounds_once(lora: Path, tmp_path: Path) -> None:
    """Catches a delta rounded to bf16 before it is added, and a scaled factor."""
    merge(lora / "bfloat16" / "full", tmp_path / "out", fuse_lora=True)
    found = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    state = load_file(lora / "bfloat16" / "state.safetensors")
    peft_merge = load_file(lora / "bfloat16" / "merged.safetensors")
    targeted = [n.removesuffix(".base_layer.weight") for n in state if "base_layer.weight" in n]
    assert len(targeted) == 8
    for module in targeted:
        weight, a, b = (
            state[f"{module}.{part}.weight"].float()
            for part in ("base_layer", "lora_A.default", "lora_B.default")
        )
        delta = 1.5 * (b @ a)
        exact = weight + delta
        assert torch.equal(found[f"{module}.weight"], exact.bfloat16()), module
        # PEFT rounds the delta, then the sum.
        step = delta.abs() * 2**-8 + exact.abs() * 2**-7
        assert bool(((peft_merge[f"{module}.weight"].float() - exact).abs() <= step).all())


def test_any_number_of_processes_same_bytes(lora: Path, tmp_path: Path) -> None:
    """Catches a fold whose bits depend on ranks or threads, and a rank-dependent export."""
    cases = [
        {"case": "qwen", "kind": "full", "fuse_lora": True},
        {"case": "qwen", "kind": "lora_only", "fuse_lora": True},
        {"case": "qwen", "kind": "full", "fuse_lora": False},
        {"case": "qwen", "kind": "lora_only", "fuse_lora": False},
        {"case": "conv2d", "kind": "full", "fuse_lora": True},
        {"case": "dora", "kind": "full", "fuse_lora": True},
    ]
    jobs = []
    for number, case in enumerate(cases):
        folder = lora / str(case["case"]) / str(case["kind"])
        merge(folder, tmp_path / f"one{number}", fuse_lora=case["fuse_lora"],
              lora_config=lora / str(case["case"]) / "config")  # fmt: skip
        config = {
            "local_dir": str(folder),
            "base_model": str(folder.parent / "base"),
            "target_dir": str(tmp_path / f"two{number}"),
            "output_format": "transformer",
            "trust_checkpoint": True,
            "quiet": True,
            "fuse_lora": case["fuse_lora"],
            "lora_config": str(folder.parent / "config"),
        }
        jobs.append({"name": str(number), "config": config})
    (tmp_path / "cases.json").write_text(json.dumps(jobs))
    (tmp_path / "seen").mkdir()
    done = torchrun(
        "tests.helpers.run_cases", [tmp_path / "cases.json", tmp_path / "seen"], nproc=3
    )
    assert done.code == 0, done.stderr
    for number in range(len(cases)):
        assert_same_folder(tmp_path / f"one{number}", tmp_path / f"two{number}")


def assert_same_folder(one: Path, two: Path) -> None:
    """Compare two folders byte for byte."""
    names = sorted(p.relative_to(one).as_posix() for p in one.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(two).as_posix() for p in two.rglob("*") if p.is_file())
    _, mismatch, errors = filecmp.cmpfiles(one, two, names, shallow=False)
    assert (mismatch, errors) == ([], [])


def test_pipeline_with_adapter_loads_through_load_lora_weights(
    lab: Lab, lora: Path, tmp_path: Path
) -> None:
    """Catches a folder that Diffusers accepts without loading anything from it."""
    from diffusers import DiffusionPipeline

    target = tmp_path / "out"
    result = merge(lora / "qwen" / "full", target, base_model=lab.base, output_format="pipeline")
    assert result.artifact_type == "diffusers_pipeline"
    report = validate_artifact(target)
    assert report["adapter"]["artifact_type"] == "peft_adapter"
    pipeline = DiffusionPipeline.from_pretrained(str(target))
    for parameter in pipeline.transformer.parameters():
        parameter.data = parameter.data.clone()
    assert_close(run(pipeline.transformer, "qwen"), lora / "qwen" / "plain.pt")
    pipeline.load_lora_weights(str(target / "lora_adapter"))
    assert_close(run(pipeline.transformer, "qwen"), lora / "qwen" / "forward.pt")
    with safe_open(target / "lora_adapter" / "pytorch_lora_weights.safetensors", "pt") as file:
        stored = json.loads(file.metadata()["lora_adapter_metadata"])
    assert stored["transformer.lora_alpha"] == 6
    # A later merge onto this folder must not publish the old adapter beside new weights.
    second = merge(
        lora / "qwen" / "full", tmp_path / "second", base_model=target,
        output_format="pipeline", fuse_lora=True,
    )  # fmt: skip
    assert not (Path(second.output_dir) / "lora_adapter").exists()


def test_adapter_alone_needs_no_base(lora: Path, tmp_path: Path) -> None:
    """Catches an export that wants the base's files, or tells a path of this machine."""
    actor = shutil.copytree(lora / "qwen" / "lora_only", tmp_path / "actor")
    shutil.rmtree(actor / "huggingface")
    merge(actor, tmp_path / "named", base_model="Qwen/Qwen-Image")
    merge(actor, tmp_path / "unnamed", base_model=None)
    merge(actor, tmp_path / "local", base_model=lora / "qwen" / "base")
    names = [
        json.loads((tmp_path / out / "lora_adapter" / "adapter_config.json").read_text())[
            "base_model_name_or_path"
        ]
        for out in ("named", "unnamed", "local")
    ]
    assert names == ["Qwen/Qwen-Image", None, "base"]
    one, two = (load_file(tmp_path / out / "lora_adapter" / "adapter_model.safetensors")
                for out in ("named", "local"))  # fmt: skip
    assert set(one) == set(two)
    state = load_file(lora / "qwen" / "state.safetensors")
    for name, tensor in one.items():
        plain = name.removeprefix("base_model.model.").removesuffix(".weight")
        assert torch.equal(tensor, state[f"{plain}.default.weight"])


def test_strength_from_the_meta_file_is_recorded_as_assumed(lora: Path, tmp_path: Path) -> None:
    """Catches a strength taken from a poor record without saying so."""
    result = merge(lora / "qwen" / "full", tmp_path / "out", fuse_lora=True)
    fusion = json.loads(Path(result.manifest_path).read_text())["lora_fusion"]
    assert (fusion["r"], fusion["lora_alpha"], fusion["scaling"]) == (4, 6, 1.5)
    assert fusion["source"] == "lora_train_meta.json"
    assert "no rsLoRA" in fusion["assumed"]
    assert any("assumed" in note for note in result.notes)


def test_native_package_with_a_folded_adapter(
    lora: Path,
    base_dir: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Catches a fold after the rows were rearranged."""
    merge(
        lora / "minimax_h3" / "full", tmp_path / "out", base_model=base_dir,
        output_format="pipeline", fuse_lora=True,
    )  # fmt: skip
    published = load_file(tmp_path / "out" / "transformer" / "model.safetensors")
    back = make_sources(published, layout="interleaved")
    wanted = load_file(lora / "minimax_h3" / "merged.safetensors")
    assert set(back) == set(wanted)
    for name, tensor in back.items():
        assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name


def test_fused_output_runs_without_peft(lora: Path, tmp_path: Path) -> None:
    """Catches an output that needs PEFT to be read."""
    merge(lora / "qwen" / "full", tmp_path / "out", fuse_lora=True)
    code = f"""
import sys
sys.modules["peft"] = None
import torch
from diffusers.utils import is_peft_available
assert not is_peft_available()
from tests.helpers.tiny_models import run_forward
from diffusers import QwenImageTransformer2DModel
model = QwenImageTransformer2DModel.from_pretrained({str(tmp_path / "out")!r})
with torch.no_grad():
    torch.save([run_forward(model)], {str(tmp_path / "forward.pt")!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env=make_environment(), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outputs = torch.load(tmp_path / "forward.pt", weights_only=True)
    assert_close(outputs, lora / "qwen" / "forward.pt")
