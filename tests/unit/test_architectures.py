"""The families: a base of each can be read, and what is peculiar to each is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dist_merge.architectures import ARCHITECTURES, find_architecture, find_by_pipeline
from dist_merge.errors import BaseModelError
from dist_merge.inspect_base import read_base
from dist_merge.model_class import import_model_class, read_class_facts
from dist_merge.operations import Read
from dist_merge.pipeline_checks import check_option, is_same_class
from dist_merge.records import BaseModel
from tests.helpers.tiny_siblings import TINY_SIBLINGS
from tests.helpers.tiny_transformers import TINY_TRANSFORMERS

TINY: dict[str, dict[str, Any]] = {
    # In this order: the class Wan is in both, here in its first form.
    **{tiny.class_name: tiny.config for tiny in TINY_SIBLINGS.values()},
    **{tiny.class_name: tiny.config for tiny in TINY_TRANSFORMERS.values()},
    "QwenImageTransformer2DModel": {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 24,
        "axes_dims_rope": [4, 6, 6],
    },
}

# Whatever kind of component it is, its folder holds what that kind loads.
CONFIGS = ("config", "scheduler_config", "tokenizer_config", "preprocessor_config", "guider_config")


def make_base(base_dir: Path, pipeline_class: str, **changes: Any) -> Path:
    """Write a pipeline: the real tiny transformer, and frozen folders of one small file each."""
    architecture = find_by_pipeline(pipeline_class)
    spec = architecture.pipelines[pipeline_class]
    index: dict[str, Any] = {"_class_name": pipeline_class}
    for name, classes in spec.components.items():
        index[name] = ["diffusers", classes[0].replace("*", "Some")]
    index.update(changes)
    for name, entry in index.items():
        folder = base_dir / name
        if name not in spec.components or entry in (None, [None, None]):
            continue
        folder.mkdir(parents=True)
        if entry[1] == architecture.transformer_class:
            cls: Any = import_model_class(architecture.module, entry[1])
            cls(**TINY[entry[1]]).save_pretrained(folder)
        else:
            for file in CONFIGS:
                (folder / f"{file}.json").write_text("{}")
            save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    (base_dir / "model_index.json").write_text(json.dumps(index))
    return base_dir


def read(base_dir: Path, *, component: str = "transformer", trust: bool = False) -> BaseModel:
    """Read the base and let its family check it."""
    base = read_base(
        base_dir, component=component, output_format="pipeline", trust_remote_code=trust
    )
    find_architecture(base.transformer_class).check_base(base)
    return base


def test_registry_has_no_class_twice() -> None:
    """Catches a family that hides another."""
    classes = [a.transformer_class for a in ARCHITECTURES]
    pipelines = [p for a in ARCHITECTURES for p in a.pipelines]
    assert len(set(classes)) == len(classes)
    assert len(set(pipelines)) == len(pipelines)


def test_find_architecture_of_an_unknown_class_lists_the_known() -> None:
    """Catches an architecture that is guessed from a like name."""
    with pytest.raises(BaseModelError, match="QwenImageTransformer2DModel") as caught:
        find_architecture("QwenImageTransformer2DModelX")
    assert caught.value.error_id == "architecture-unknown"
    with pytest.raises(BaseModelError, match="`Nope`"):
        find_by_pipeline("Nope")


@pytest.mark.parametrize(
    "pipeline_class",
    [
        "QwenImageEditPlusPipeline",
        "StableDiffusion3Pipeline",
        "FluxKontextPipeline",
        "Flux2KleinPipeline",
        "WanVACEPipeline",
        "LTX2Pipeline",
        "QwenImage21Pipeline",
        "ZImageOmniPipeline",
        "HunyuanVideo15ImageToVideoPipeline",
        "CogVideoXImageToVideoPipeline",
        "OvisImagePipeline",
        "SanaControlNetPipeline",
        "SanaVideoPipeline",
        "ChromaPipeline",
        "HiDreamImagePipeline",
        "CosmosVideoToWorldPipeline",
        "Kandinsky5I2IPipeline",
    ],
)
def test_read_base_of_each_family_passes_the_class_check(
    tmp_path: Path, pipeline_class: str
) -> None:
    """Catches a class that does not build without data, or persistent buffers that are lost."""
    options = {"boundary_ratio": 0.5} if "Wan" in pipeline_class else {}
    base = read(make_base(tmp_path / "base", pipeline_class, **options))
    assert base.model_class_check == "passed"
    assert ("pos_embed.pos_embed" in base.tensors) == ("Diffusion3" in pipeline_class)
    expressions = find_architecture(base.transformer_class).make_expressions(base, base.tensors)
    assert expressions == {name: Read(name) for name in base.tensors}


def test_class_facts_of_wan_name_the_fp32_islands_of_the_declaration() -> None:
    """Catches islands that are rounded where the class cannot be imported."""
    for name in ("WanTransformer3DModel", "WanVACETransformer3DModel"):
        architecture = find_architecture(name)
        facts = read_class_facts(architecture, TINY[name])
        assert facts is not None
        assert set(facts.keep_in_fp32) == set(architecture.keep_in_fp32)


def test_wan_with_two_experts_reads_the_chosen_one(tmp_path: Path) -> None:
    """Catches the other expert replaced, or not published."""
    base_dir = make_base(tmp_path / "base", "WanImageToVideoPipeline", boundary_ratio=0.9)
    base = read(base_dir, component="transformer_2")
    weights = "diffusion_pytorch_model.safetensors"
    assert [f.path for f in base.replaced] == [f"transformer_2/{weights}"]
    assert f"transformer/{weights}" in {f.path for f in base.files}
    assert "norm2" in base.keep_in_fp32


@pytest.mark.parametrize("ratio", [None, 0.0, 1, 1.5])
def test_wan_with_two_experts_and_no_border_is_refused(tmp_path: Path, ratio: float | None) -> None:
    """Catches a dual pipeline in which one expert is never used."""
    with pytest.raises(BaseModelError, match="boundary_ratio"):
        read(make_base(tmp_path / "base", "WanPipeline", boundary_ratio=ratio))


def test_wan_with_one_expert_needs_no_border(tmp_path: Path) -> None:
    """Catches Wan 2.1 refused for what only Wan 2.2 has."""
    base_dir = make_base(
        tmp_path / "base",
        "WanPipeline",
        transformer_2=[None, None],
        boundary_ratio=None,
        expand_timesteps=True,
        tokenizer=["transformers", "T5TokenizerFast"],
        scheduler=["diffusers", "UniPCMultistepScheduler"],
    )
    assert read(base_dir).pipeline_class == "WanPipeline"
    with pytest.raises(BaseModelError, match="no component `transformer_2`"):
        read(base_dir, component="transformer_2")


def test_wan_skips_tensors_that_its_class_skips(tmp_path: Path) -> None:
    """Catches an old Wan file refused for tensors that no Wan model loads."""
    base_dir = make_base(tmp_path / "base", "WanVideoToVideoPipeline")
    from safetensors.torch import load_file

    path = base_dir / "transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "blocks.0.attn2.norm_added_q.weight": torch.zeros(2)}, path)
    assert set(read(base_dir).tensors) == set(tensors)


def test_ltx2_library_of_its_own_is_known_only_there(tmp_path: Path) -> None:
    """Catches LTX-2 refused for its library, or that library accepted elsewhere."""
    entry = ["ltx2", "LTX2TextConnectors"]
    assert read(make_base(tmp_path / "a", "LTX2ImageToVideoPipeline", connectors=entry))
    with pytest.raises(BaseModelError, match="unknown library"):
        read(make_base(tmp_path / "b", "FluxPipeline", vae=["ltx2", "AutoencoderKL"]))


def make_boogu(base_dir: Path) -> Path:
    """A Boogu pipeline as published; its class is not installed here."""
    index = {
        "_class_name": "BooguImagePipeline",
        "mllm": ["transformers", "Qwen3VLForConditionalGeneration"],
        "processor": ["transformers", "Qwen3VLProcessor"],
        "scheduler": [
            "scheduling_flow_match_euler_discrete_time_shifting",
            "FlowMatchEulerDiscreteScheduler",
        ],
        "transformer": ["transformer_boogu", "BooguImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    for name in ("mllm", "processor", "scheduler", "transformer", "vae"):
        (base_dir / name).mkdir(parents=True)
        for file in ("config", "scheduler_config", "preprocessor_config"):
            (base_dir / name / f"{file}.json").write_text("{}")
        save_file({"a": torch.zeros(1)}, base_dir / name / "diffusion_pytorch_model.safetensors")
    config = {"_class_name": "BooguImageTransformer2DModel"}
    (base_dir / "transformer/config.json").write_text(json.dumps(config))
    (base_dir / "transformer/transformer_boogu.py").write_text("raise SystemExit")
    (base_dir / "model_index.json").write_text(json.dumps(index))
    return base_dir


def test_boogu_keeps_its_python_files_and_says_that_no_class_was_checked(tmp_path: Path) -> None:
    """Catches a lost shim, a shim that is run, or a check reported that did not happen."""
    base_dir = make_boogu(tmp_path / "base")
    with pytest.raises(BaseModelError, match="transformer_boogu.py"):
        read(base_dir)
    base = read(base_dir, trust=True)
    assert "transformer/transformer_boogu.py" in {f.path for f in base.files}
    assert base.model_class_check.startswith("not_run: ")
    assert base.config_defaults is None


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("T5TokenizerFast", "T5Tokenizer", True),
        ("T5Tokenizer", "T5TokenizerFast", True),
        ("CLIPImageProcessorPil", "CLIPImageProcessor", True),
        ("UniPCMultistepScheduler", "*Scheduler", True),
        ("T5TokenizerFaster", "T5Tokenizer", False),
        ("AutoencoderKL", "AutoencoderKLWan", False),
    ],
)
def test_is_same_class_accepts_only_known_variants(name: str, pattern: str, expected: bool) -> None:
    """Catches a like-named class taken for the declared one."""
    assert is_same_class(name, pattern) is expected


def test_check_option_tells_bool_from_number() -> None:
    """Catches `true` taken for a number, or 1 refused as a float."""
    check_option("x", 1, types=(float,))
    check_option("x", None, types=(float, type(None)))
    check_option("x", False, types=(bool,))
    for value, types in ((True, (float,)), (1, (bool,)), ("a", (float,)), (None, (bool,))):
        with pytest.raises(BaseModelError, match="`x` has a wrong type"):
            check_option("x", value, types=types)
