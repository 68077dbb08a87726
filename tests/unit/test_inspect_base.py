"""The base reader: a real tiny pipeline is described fully, and every misuse is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_merge.errors import BaseModelError, MergeError
from dist_merge.inspect_base import read_base
from dist_merge.records import BaseModel
from dist_merge.wire import decode_base, encode_base
from tests.helpers.tiny_models import build_pipeline

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Qwen-Image pipeline; never changed."""
    return build_pipeline(tmp_path_factory.mktemp("base") / "pipeline")


@pytest.fixture
def base_dir(original: Path, tmp_path: Path) -> Path:
    """A copy of the pipeline, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "pipeline"))


def read(base_dir: Path, **options: Any) -> BaseModel:
    """Read a base with the usual options."""
    known = {"component": "transformer", "output_format": "pipeline", "trust_remote_code": False}
    return read_base(base_dir, **{**known, **options})


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file in place."""
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def split_weights(base_dir: Path) -> dict[str, str]:
    """Split the transformer's single file in two with an index; returns its weight map."""
    folder = base_dir / "transformer"
    tensors = load_file(base_dir / WEIGHTS)
    (base_dir / WEIGHTS).unlink()
    weight_map = {}
    for number, part in enumerate((sorted(tensors)[:40], sorted(tensors)[40:]), start=1):
        name = f"diffusion_pytorch_model-{number:05d}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    (base_dir / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def fail(base_dir: Path, error_id: str, **options: Any) -> MergeError:
    """Read a base that must be refused, and return the error."""
    with pytest.raises(MergeError) as caught:
        read(base_dir, **options)
    assert caught.value.error_id == error_id, str(caught.value)
    return caught.value


def test_read_base_of_a_pipeline_describes_everything(original: Path) -> None:
    """Catches a tensor, file or class fact that is left out."""
    base = read(original)
    tensors = load_file(original / WEIGHTS)
    assert base.is_pipeline
    assert base.pipeline_class == "QwenImagePipeline"
    assert base.transformer_class == "QwenImageTransformer2DModel"
    assert base.component_dir == "transformer"
    assert {n: s.shape for n, s in base.tensors.items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    assert {s.dtype for s in base.tensors.values()} == {"float32"}
    assert set(base.tensor_files.values()) == {WEIGHTS}
    assert base.model_class_check == "passed"
    assert base.config_defaults is not None
    assert base.config_defaults["axes_dims_rope"] == [16, 56, 56]
    assert [f.path for f in base.replaced] == [WEIGHTS]
    paths = {p.relative_to(original).as_posix() for p in original.rglob("*") if p.is_file()}
    assert {f.path for f in base.files} == paths - {WEIGHTS}
    assert all(f.nbytes == (original / f.path).stat().st_size for f in base.files)
    assert all(f.mtime_ns and f.inode for f in base.files)
    assert base.left_out == ()
    assert decode_base(encode_base(base)) == base


def test_read_base_leaves_random_state_and_default_dtype_alone(original: Path) -> None:
    """Catches a model class built with real random numbers, in a trainer's process."""
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        before = torch.get_rng_state()
        read(original)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.get_default_dtype() == torch.float64
        assert torch.zeros(1).device.type == "cpu"
    finally:
        torch.set_default_dtype(torch.float32)


def test_read_base_of_a_lone_transformer_takes_only_its_config(
    original: Path, tmp_path: Path
) -> None:
    """Catches other files carried into a lone transformer."""
    base_dir = Path(shutil.copytree(original / "transformer", tmp_path / "lone"))
    (base_dir / "README.md").write_text("about")
    base = read(base_dir, output_format="transformer")
    assert not base.is_pipeline
    assert base.pipeline_class is None
    assert base.component_dir == "."
    assert [f.path for f in base.files] == ["config.json"]
    assert [f.path for f in base.replaced] == ["diffusion_pytorch_model.safetensors"]
    assert "--output_format transformer" in str(fail(base_dir, "base-not-a-pipeline"))


def test_read_base_of_a_pipeline_for_a_transformer_takes_only_its_config(base_dir: Path) -> None:
    """Catches a lone transformer that needs components it does not publish."""
    shutil.rmtree(base_dir / "vae")
    base = read(base_dir, output_format="transformer")
    assert [f.path for f in base.files] == ["transformer/config.json"]


def test_read_base_with_an_index_reads_all_files(base_dir: Path) -> None:
    """Catches an index whose shards are not all read or not all replaced."""
    weight_map = split_weights(base_dir)
    base = read(base_dir)
    assert base.tensor_files == {n: f"transformer/{f}" for n, f in sorted(weight_map.items())}
    assert {f.path for f in base.replaced} == {INDEX, *base.tensor_files.values()}


def test_read_base_replaces_every_variant_and_leaves_out_strays(base_dir: Path) -> None:
    """Catches stale weights of the old model that are published beside the new ones."""
    stale = [
        "transformer/diffusion_pytorch_model.fp16.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.fp16.json",
        "transformer/diffusion_pytorch_model.bin",
        "transformer/model.onnx",
    ]
    stray = ["qwen.safetensors", "old/model.gguf", "lora_adapter/adapter_config.json"]
    stray.append("merge_manifest.json")
    for path in [*stale, *stray, ".cache/x", "assets/a.png"]:
        (base_dir / path).parent.mkdir(exist_ok=True)
        (base_dir / path).write_text("{}")
    base = read(base_dir)
    assert {f.path for f in base.replaced} == {WEIGHTS, *stale}
    assert set(base.left_out) == set(stray)
    copied = {f.path for f in base.files}
    assert "assets/a.png" in copied
    assert not copied & {*stale, *stray, ".cache/x"}


def test_read_base_finds_location_fields(base_dir: Path) -> None:
    """Catches somebody's local path that is published in a config."""
    for path in ("model_index.json", "vae/config.json", "transformer/config.json"):
        edit_json(base_dir / path, lambda d: d.update(_name_or_path="/home/me/x"))
    edit_json(
        base_dir / "tokenizer/tokenizer_config.json", lambda d: d.update(name_or_path="/home/me")
    )
    edited = read(base_dir).edited_configs
    assert edited == {
        "model_index.json": ("_name_or_path",),
        "transformer/config.json": ("_name_or_path",),
        "vae/config.json": ("_name_or_path",),
        "tokenizer/tokenizer_config.json": ("name_or_path",),
    }


def test_read_base_with_a_hub_cache_link_reads_through_it(base_dir: Path, tmp_path: Path) -> None:
    """Catches a hub cache, whose files are links, that is refused or copied as a link."""
    blob = tmp_path / "blob"
    (base_dir / WEIGHTS).rename(blob)
    (base_dir / WEIGHTS).symlink_to(blob)
    assert read(base_dir).replaced[0].nbytes == blob.stat().st_size


def test_read_base_accepts_a_field_that_the_class_no_longer_has(base_dir: Path) -> None:
    """Catches a published config refused for a field that Diffusers ignores as well."""
    edit_json(base_dir / "transformer/config.json", lambda d: d.update(old_field=768))
    assert read(base_dir).extra["unused_config_fields"] == ["old_field"]


def test_read_base_of_no_model_says_what_is_needed(tmp_path: Path) -> None:
    """Catches a vague message for a wrong folder or a hub name."""
    assert "no such folder" in str(fail(tmp_path / "Qwen", "base-not-a-model"))
    assert "model_index.json" in str(fail(tmp_path, "base-not-a-model"))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "_class_name" in str(fail(tmp_path, "base-not-a-model"))


def _edit_index(**changes: Any) -> Callable[[Path], None]:
    def damage(base_dir: Path) -> None:
        edit_json(base_dir / "model_index.json", lambda d: d.update(changes))

    return damage


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def damage(base_dir: Path) -> None:
        edit_json(base_dir / "transformer/config.json", lambda d: d.update(changes))

    return damage


def _remove(path: str) -> Callable[[Path], None]:
    def damage(base_dir: Path) -> None:
        target = base_dir / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return damage


def _rename(path: str, new: str) -> Callable[[Path], None]:
    def damage(base_dir: Path) -> None:
        (base_dir / path).rename(base_dir / new)

    return damage


def _write(path: str) -> Callable[[Path], None]:
    def damage(base_dir: Path) -> None:
        (base_dir / path).write_text("x = 1")

    return damage


def _cut(path: str) -> Callable[[Path], None]:
    def damage(base_dir: Path) -> None:
        content = (base_dir / path).read_bytes()
        (base_dir / path).write_bytes(content[:-1])

    return damage


VAE = "vae/diffusion_pytorch_model.safetensors"
MISUSES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "class unknown": (_edit_config(_class_name="Foo"), "architecture-unknown", "QwenImage"),
    "pipeline unknown": (_edit_index(_class_name="Foo"), "architecture-unknown", "WanPipeline"),
    "pipeline of another": (_edit_index(_class_name="FluxPipeline"), "class-mismatch", "Flux"),
    "index class": (
        _edit_index(transformer=["diffusers", "FluxTransformer2DModel"]),
        "class-mismatch",
        "transformer/config.json",
    ),
    "vae class": (
        _edit_index(vae=["diffusers", "AutoencoderKL"]),
        "class-mismatch",
        "AutoencoderKLQwenImage",
    ),
    "vae null": (_edit_index(vae=[None, None]), "component-missing", "`vae`"),
    "vae malformed": (_edit_index(vae=["diffusers"]), "pipeline-invalid", "[library, class]"),
    "vae folder": (_remove("vae"), "component-missing", "`vae`"),
    "vae weights": (_remove(VAE), "base-weights-missing", "`vae`"),
    "vae weights cut": (_cut(VAE), "bad-safetensors", "vae/"),
    "vae config": (_remove("vae/config.json"), "component-missing", "config.json"),
    "scheduler": (
        _remove("scheduler/scheduler_config.json"),
        "component-missing",
        "scheduler",
    ),
    "unknown name": (_edit_index(refiner=["diffusers", "X"]), "pipeline-invalid", "`refiner`"),
    "library": (
        _edit_index(vae=["my_vae", "AutoencoderKLQwenImage"]),
        "pipeline-invalid",
        "vae/my_vae.py",
    ),
    "quantised": (_edit_config(quantization_config={"bits": 4}), "base-quantised", "quant"),
    "trained config": (_remove("transformer/config.json"), "component-missing", "--component"),
    "trained weights": (_remove(WEIGHTS), "base-weights-missing", "no weight file"),
    "variant only": (
        _rename(WEIGHTS, WEIGHTS.replace(".safe", ".fp16.safe")),
        "base-weights-missing",
        "diffusion_pytorch_model.fp16.safetensors",
    ),
    "bin only": (
        _rename(WEIGHTS, "transformer/diffusion_pytorch_model.bin"),
        "base-weights-missing",
        ".bin files are not read",
    ),
    "trained cut": (_cut(WEIGHTS), "bad-safetensors", "transformer/diff"),
    "layers": (_edit_config(num_layers=3), "base-class-mismatch", "transformer_blocks.2"),
    "shape": (_edit_config(joint_attention_dim=25), "base-class-mismatch", "not ["),
    "unbuildable": (_edit_config(num_layers="two"), "base-class-unbuildable", "TypeError"),
    "python": (_write("vae/code.py"), "remote-code", "`vae/code.py`"),
    "not json": (_write("model_index.json"), "bad-json", "model_index.json"),
}


@pytest.mark.parametrize("name", sorted(MISUSES))
def test_read_base_of_a_damaged_pipeline_names_the_damage(base_dir: Path, name: str) -> None:
    """Catches a base that would make an unusable artifact, found late or not at all."""
    damage, error_id, message = MISUSES[name]
    damage(base_dir)
    assert message in str(fail(base_dir, error_id))


def test_read_base_with_trusted_code_copies_it(base_dir: Path) -> None:
    """Catches Python files lost, or imported (this one would raise)."""
    (base_dir / "transformer/shim.py").write_text("raise SystemExit")
    base = read(base_dir, trust_remote_code=True)
    assert "transformer/shim.py" in {f.path for f in base.files}
    base = read(base_dir, trust_remote_code=True, output_format="transformer")
    assert "transformer/shim.py" in {f.path for f in base.files}


def test_read_base_of_an_absent_component_is_refused(base_dir: Path) -> None:
    """Catches a merge into a component that the base does not have."""
    assert "--component" in str(fail(base_dir, "component-missing", component="transformer_2"))


def test_read_base_with_a_wrong_index_names_tensor_or_file(base_dir: Path) -> None:
    """Catches an index that promises what its files do not hold, or hides what they do."""
    weight_map = split_weights(base_dir)
    name = sorted(weight_map)[0]
    good = (base_dir / INDEX).read_text()
    edit_json(base_dir / INDEX, lambda d: d["weight_map"].update(ghost=weight_map[name]))
    assert "`ghost`" in str(fail(base_dir, "index-mismatch"))
    (base_dir / INDEX).write_text(good)
    edit_json(base_dir / INDEX, lambda d: d["weight_map"].pop(name))
    assert f"also holds `{name}`" in str(fail(base_dir, "index-mismatch"))
    (base_dir / INDEX).write_text(good)
    edit_json(base_dir / INDEX, lambda d: d["weight_map"].update({name: "../x.safetensors"}))
    assert "../x.safetensors" in str(fail(base_dir, "index-mismatch"))
    (base_dir / INDEX).write_text(good)
    (base_dir / "transformer" / weight_map[name]).unlink()
    assert "is missing" in str(fail(base_dir, "index-mismatch"))


def test_read_base_with_two_weight_sets_is_refused(base_dir: Path) -> None:
    """Catches a guess between a single file and an index."""
    content = (base_dir / WEIGHTS).read_bytes()
    split_weights(base_dir)
    (base_dir / WEIGHTS).write_bytes(content)
    assert ".index.json" in str(fail(base_dir, "base-weights-ambiguous"))


def test_read_base_checks_the_index_of_a_frozen_component(base_dir: Path) -> None:
    """Catches an incomplete download of a component that is only copied."""
    index = base_dir / "text_encoder/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"ghost": "model.safetensors"}}))
    assert "`ghost`" in str(fail(base_dir, "index-mismatch"))
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    error = fail(base_dir, "index-mismatch")
    assert "model-00001-of-00002" in str(error)
    assert isinstance(error, BaseModelError)
