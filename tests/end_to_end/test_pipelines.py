"""Whole pipelines of every family: trained under FSDP2, merged under torchrun, reloaded."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dist_merge import MergeError, ModelMergerConfig, merge_model, validate_artifact
from tests.helpers.launch import torchrun
from tests.helpers.tiny_pipelines import (
    BOOGU_PACKAGE,
    copy_without,
    family_of,
    run_pipeline_forward,
)
from tests.helpers.train_pipelines import RUNS, load_component

WEIGHTS = "diffusion_pytorch_model.safetensors"
# Name parts that a class keeps in fp32 under a 16-bit cast.
ISLANDS = {"wan": ("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")}
# Pipelines that load as a whole here; the others are reloaded component by component.
LOADABLE = ("sd3", "flux", "wan", "wan_dual", "wan_second", "ltx2")
DTYPES = ("float16", "bfloat16", "base")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all pipelines in one torchrun start, and merge everything in another."""
    out = tmp_path_factory.mktemp("pipelines")
    done = torchrun("tests.helpers.train_pipelines", ["--out", out], nproc=2, timeout=300)
    assert done.code == 0, done.stderr
    cases = []
    for name in RUNS:
        for target, options in list_merges(name):
            config = {**make_config(out, name), "target_dir": str(out / name / target), **options}
            cases.append({"name": f"{name}-{target}", "config": config})
    (out / "cases.json").write_text(json.dumps(cases))
    (out / "seen").mkdir()
    done = torchrun(
        "tests.helpers.run_cases", [out / "cases.json", out / "seen"], nproc=2, timeout=300
    )
    assert done.code == 0, done.stderr
    failed = [path.read_text() for path in (out / "seen").iterdir()]
    assert not [text for text in failed if json.loads(text)["error_id"]], failed
    return out


def list_merges(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Target folder and options of every merge of one run."""
    merges: list[tuple[str, dict[str, Any]]] = [
        ("pipeline", {"output_format": "pipeline"}),
        ("transformer", {"output_format": "transformer"}),
    ]
    for dtype in DTYPES:
        merges.append((dtype, {"output_format": "transformer", "dtype": dtype}))
    return merges


def make_config(out: Path, name: str) -> dict[str, Any]:
    """Options that every merge of one run has."""
    pipeline, component = RUNS[name]
    return {
        "local_dir": str(out / name / "actor"),
        "base_model": str(out / "base" / pipeline),
        "component": component,
        "trust_checkpoint": True,
        "trust_remote_code": pipeline == "boogu",
        "quiet": True,
    }


@pytest.fixture
def boogu_installed() -> Iterator[None]:
    """Make the stand-in package importable, and forget it afterwards."""
    sys.path.insert(0, str(BOOGU_PACKAGE))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(BOOGU_PACKAGE))
    for module in [name for name in sys.modules if name.partition(".")[0] == "boogu"]:
        del sys.modules[module]


def run_reloaded(model: Any, pipeline: str) -> list[torch.Tensor]:
    """Outputs with the arithmetic of the training run."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        outputs = run_pipeline_forward(model, pipeline)
    torch.set_num_threads(threads)
    return outputs


def list_files(folder: Path) -> set[str]:
    """All files as relative POSIX paths."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", RUNS)
def test_pipeline_keeps_frozen_files_and_has_the_trained_weights(trained: Path, name: str) -> None:
    """Catches a lost or changed component, wrong weights, a wrong or foreign file."""
    pipeline, component = RUNS[name]
    target, base = trained / name / "pipeline", trained / "base" / pipeline
    found, original = list_files(target), list_files(base)
    assert found == original | {"merge_manifest.json"}
    manifest = json.loads((target / "merge_manifest.json").read_text())
    edited = set(manifest["config_transform"]["files"])
    for path in original - edited - {f"{component}/{WEIGHTS}"}:
        assert (target / path).read_bytes() == (base / path).read_bytes(), path
    for path in edited:
        one, two = (json.loads((folder / path).read_text()) for folder in (base, target))
        assert {k: v for k, v in one.items() if k not in ("_name_or_path", "name_or_path")} == two
    reference = load_file(trained / name / "reference.safetensors")
    weights = load_file(target / component / WEIGHTS)
    assert set(weights) == set(reference)
    for tensor_name, tensor in reference.items():
        assert torch.equal(weights[tensor_name], tensor), tensor_name
    assert manifest["trained_components"] == [component]
    validate_artifact(target)


@pytest.mark.parametrize("name", LOADABLE)
def test_pipeline_loads_and_runs_as_trained(trained: Path, name: str) -> None:
    """Catches a folder that its own class does not load."""
    from diffusers import DiffusionPipeline

    pipeline, component = RUNS[name]
    loaded = DiffusionPipeline.from_pretrained(str(trained / name / "pipeline"))
    index = json.loads((trained / name / "pipeline" / "model_index.json").read_text())
    assert type(loaded).__name__ == index["_class_name"]
    outputs = run_reloaded(getattr(loaded, component), pipeline)
    wanted = torch.load(trained / name / "forward.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))
    if name in ("wan_dual", "wan_second"):
        assert loaded.config.boundary_ratio == 0.875
        other = "transformer_2" if component == "transformer" else "transformer"
        frozen = load_file(trained / "base" / pipeline / other / WEIGHTS)
        state = getattr(loaded, other).state_dict()
        assert all(torch.equal(state[n], tensor) for n, tensor in frozen.items())
    if name == "wan":
        assert loaded.config.expand_timesteps is True
        assert loaded.transformer_2 is None


@pytest.mark.parametrize("name", RUNS)
def test_transformer_loads_and_runs_as_trained(
    trained: Path, boogu_installed: None, name: str
) -> None:
    """Catches a lone transformer with renamed tensors or another config."""
    target = trained / name / "transformer"
    files = list_files(target)
    shims = {path for path in files if path.endswith(".py")}
    assert files - shims == {"config.json", "merge_manifest.json", WEIGHTS}
    model = load_component(target.parent, "transformer")
    outputs = run_reloaded(model, RUNS[name][0])
    wanted = torch.load(trained / name / "forward.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))
    validate_artifact(target)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RUNS)
def test_dtypes_and_islands(trained: Path, name: str, dtype: str) -> None:
    """Catches islands rounded to 16 bits, and tensors kept in fp32 that are no islands."""
    found = load_file(trained / name / dtype / WEIGHTS)
    words = ISLANDS.get(family_of(RUNS[name][0]), ())
    for tensor_name, tensor in load_file(trained / name / "reference.safetensors").items():
        wanted = torch.float32 if dtype == "base" else getattr(torch, dtype)
        if any(part in words for part in tensor_name.split(".")):
            wanted = torch.float32
        assert found[tensor_name].dtype == wanted, tensor_name
        assert torch.equal(found[tensor_name], tensor.to(wanted)), tensor_name


def test_base_dtype_follows_the_base_per_tensor(trained: Path, tmp_path: Path) -> None:
    """Catches `--dtype base` taken for one dtype."""
    from safetensors.torch import save_file

    base = Path(shutil.copytree(trained / "base" / "flux", tmp_path / "base"))
    path = base / "transformer" / WEIGHTS
    mixed = {n: t.bfloat16() if "norm" in n else t for n, t in load_file(path).items()}
    save_file(mixed, path, metadata={"format": "pt"})
    config = {**make_config(trained, "flux"), "base_model": base, "dtype": "base"}
    merge_model(ModelMergerConfig(**config, target_dir=tmp_path / "out"))
    found = load_file(tmp_path / "out" / "transformer" / WEIGHTS)
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in mixed.items()}


def test_sd3_takes_its_positions_from_the_checkpoint(trained: Path) -> None:
    """Catches the persistent buffer taken from the base."""
    name = "pos_embed.pos_embed"
    base = load_file(trained / "base" / "sd3" / "transformer" / WEIGHTS)[name]
    found = load_file(trained / "sd3" / "pipeline" / "transformer" / WEIGHTS)[name]
    assert torch.equal(found, base + 1)


def test_sd3_without_its_optional_components(trained: Path, tmp_path: Path) -> None:
    """Catches a component demanded that the pipeline declares optional, or lost one accepted."""
    base = copy_without(trained / "base" / "sd3", tmp_path / "base", "image_encoder")
    config = {**make_config(trained, "sd3"), "base_model": base}
    merge_model(ModelMergerConfig(**config, target_dir=tmp_path / "out"))
    base = copy_without(trained / "base" / "sd3", tmp_path / "less", "text_encoder_3")
    with pytest.raises(MergeError, match="component-missing") as caught:
        merge_model(
            ModelMergerConfig(**{**config, "base_model": base}, target_dir=tmp_path / "none")
        )
    assert "text_encoder_3" in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_wan_experts_without_a_border_are_refused(trained: Path, tmp_path: Path) -> None:
    """Catches two experts published without the step at which they take turns."""
    base = Path(shutil.copytree(trained / "base" / "wan_dual", tmp_path / "base"))
    path = base / "model_index.json"
    for ratio in (None, 1.0, 0):
        path.write_text(json.dumps({**json.loads(path.read_text()), "boundary_ratio": ratio}))
        config = {**make_config(trained, "wan_dual"), "base_model": base}
        with pytest.raises(MergeError, match="boundary_ratio"):
            merge_model(ModelMergerConfig(**config, target_dir=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_mixed_up_component_is_refused(trained: Path, tmp_path: Path) -> None:
    """Catches a checkpoint merged onto a pipeline of another family, or a component not there."""
    config = {**make_config(trained, "wan"), "base_model": trained / "base" / "flux"}
    with pytest.raises(MergeError, match="class-mismatch"):
        merge_model(ModelMergerConfig(**config, target_dir=tmp_path / "out"))
    config = {**make_config(trained, "wan"), "component": "transformer_2"}
    with pytest.raises(MergeError, match="component-missing"):
        merge_model(ModelMergerConfig(**config, target_dir=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_boogu_without_its_package_says_which_check_did_not_run(
    trained: Path, boogu_installed: None, tmp_path: Path
) -> None:
    """Catches a check that is reported but did not happen, or that is left out without a word."""
    without = json.loads((trained / "boogu" / "pipeline" / "merge_manifest.json").read_text())
    config = {**make_config(trained, "boogu"), "target_dir": tmp_path / "out"}
    merge_model(ModelMergerConfig(**config))
    with_package = json.loads((tmp_path / "out" / "merge_manifest.json").read_text())
    assert without["verification"]["model_class_check"].startswith("not_run: ")
    assert without["verification"]["runtime"] == "not_run"
    assert with_package["verification"]["model_class_check"] == "passed"
    assert with_package["verification"]["runtime"] == "passed"
    assert without["files"] == with_package["files"]


def test_boogu_needs_consent_for_its_python_files(trained: Path, tmp_path: Path) -> None:
    """Catches Python files published without the user's word."""
    config = {**make_config(trained, "boogu"), "trust_remote_code": False}
    for output_format in ("pipeline", "transformer"):
        with pytest.raises(MergeError, match="remote-code") as caught:
            merge_model(
                ModelMergerConfig(
                    **config, output_format=output_format, target_dir=tmp_path / "out"
                )
            )
        assert "transformer_boogu.py" in str(caught.value)
        assert "--trust-remote-code" in str(caught.value)
    assert not (tmp_path / "out").exists()
