"""MiniMax H3: the native package against the Diffusers class and Diffusers' own converter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_merge.architectures import find_architecture
from dist_merge.architectures.minimax_h3 import (
    InverseFrequency,
    QKVInterleave,
    SwapHalves,
    make_inverse_frequencies,
)
from dist_merge.errors import BaseModelError, MergeError, PlanError
from dist_merge.inspect_base import read_base
from dist_merge.operations import evaluate, invert, is_invertible, list_inputs, make_spec
from dist_merge.records import BaseModel, TensorSpec
from dist_merge.wire import decode_base, encode_base

HEADS, HEAD_DIM, HIDDEN, FFN, TIME, TIME_HIDDEN = 3, 16, 40, 24, 14, 20
CONFIG = {
    "_class_name": "MiniMaxH3DiTModel",
    "hidden_size": HIDDEN,
    "num_layers": 2,
    "token_refiner_num_layers": 1,
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_DIM,
    "ffn_hidden_size": FFN,
    "latents_dim": 6,
    "audio_latents_dim": 5,
    "patch_size": [1, 2, 2],
    "text_dim": 12,
    "timestep_input_dim": 8,
    "time_embed_hidden_size": TIME_HIDDEN,
    "time_embed_dim": TIME,
    "rope_inv_freq_len": 2,
    "norm_eps": 1e-5,
    "qk_norm_eps": 1e-5,
    "final_norm_eps": 1e-5,
    "adaln_out_features": 18 * HIDDEN,
    "final_adaln_out_features": 2 * HIDDEN,
}
INDEX = {
    "_class_name": "MiniMaxH3Pipeline",
    "_diffusers_version": "0.32.2",
    "transformer": ["diffusers", "MiniMaxH3DiTModel"],
    "text_encoder": ["transformers", "MiniMaxH3Qwen3VLHFEncoder"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "processor": ["transformers", "Qwen3VLProcessor"],
    "video_vae": ["diffusers", "MiniMaxH3VideoVAE"],
    "audio_vae": ["diffusers", "MiniMaxH3AudioVAE"],
    "scheduler": None,
    "_minimax_h3": {"schema_version": 1, "partition": "fl2va", "tasks": ["t2va", "fl2va"]},
}
FP32 = ("video_patch_proj", "audio_patch_proj", "time_embedder", "video_out", "audio_out", "rope")


def make_native_shapes() -> dict[str, tuple[int, ...]]:
    """Native names and shapes, written down from the format's description."""
    inner = HEADS * HEAD_DIM
    linears = {
        "video_patch_proj": (HIDDEN, 24),
        "audio_patch_proj": (HIDDEN, 5),
        "condition_proj": (HIDDEN, 12),
        "time_embedder.proj_in": (TIME_HIDDEN, 8),
        "time_embedder.proj_out": (TIME, TIME_HIDDEN),
        "final_layer.adaln_proj.linear": (2 * HIDDEN, TIME),
        "final_layer.video_out": (24, HIDDEN),
        "final_layer.audio_out": (5, HIDDEN),
    }
    shapes: dict[str, tuple[int, ...]] = {"rope.inv_freq": (2,)}
    for name in ("token_refiner.final_norm", "final_layer.norm"):
        shapes[f"{name}.weight"] = (HIDDEN,)
    for prefix in ("blocks.0", "blocks.1", "token_refiner.blocks.0"):
        shapes |= {
            f"{prefix}.norm1.weight": (HIDDEN,),
            f"{prefix}.norm2.weight": (HIDDEN,),
            f"{prefix}.attn.q_norm.weight": (HEAD_DIM,),
            f"{prefix}.attn.k_norm.weight": (HEAD_DIM,),
            f"{prefix}.attn.qkv_proj.weight": (3 * inner, HIDDEN),
            f"{prefix}.attn.out_proj.weight": (HIDDEN, inner),
            f"{prefix}.mlp.fc1.weight": (2 * FFN, HIDDEN),
            f"{prefix}.mlp.fc2.weight": (HIDDEN, FFN),
        }
        if not prefix.startswith("token"):
            linears[f"{prefix}.adaln_proj.linear"] = (18 * HIDDEN, TIME)
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def make_native_tensors() -> dict[str, torch.Tensor]:
    """Random native tensors in the dtypes of the published package."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in make_native_shapes().items():
        islands = any(word in name for word in FP32)
        # Rounded to bf16 even in fp32, as after a training step in bf16.
        value = torch.randn(shape, generator=generator).to(torch.bfloat16)
        tensors[name] = value.float() if islands else value
    tensors["rope.inv_freq"] = make_inverse_frequencies(2, theta=10000.0)
    return tensors


@pytest.fixture
def base_dir(tmp_path: Path) -> Path:
    """A native package with small frozen folders."""
    base = tmp_path / "FL2VA"
    for name in ("transformer", "text_encoder", "tokenizer", "processor", "video_vae", "audio_vae"):
        (base / name).mkdir(parents=True)
        for file in ("config", "tokenizer_config", "preprocessor_config"):
            (base / name / f"{file}.json").write_text("{}")
        if name in ("text_encoder", "audio_vae"):
            save_file({"a": torch.zeros(1)}, base / name / "model.safetensors")
    (base / "video_vae/source").mkdir()
    save_file({"a": torch.zeros(1)}, base / "video_vae/source/model.safetensors")
    (base / "transformer/config.json").write_text(json.dumps(CONFIG))
    save_file(make_native_tensors(), base / "transformer/model.safetensors")
    (base / "model_index.json").write_text(json.dumps(INDEX))
    return base


def read(base_dir: Path, **options: Any) -> BaseModel:
    """Read the native package and let its family check it."""
    known = {"component": "transformer", "output_format": "pipeline", "trust_remote_code": False}
    base = decode_base(encode_base(read_base(base_dir, **{**known, **options})))
    find_architecture(base.transformer_class).check_base(base)
    return base


def make_sources(native: dict[str, torch.Tensor], *, layout: str) -> dict[str, torch.Tensor]:
    """Native tensors in Diffusers form, by Diffusers' own converter."""
    from diffusers.loaders import single_file_utils

    convert: Any = single_file_utils.convert_minimax_h3_transformer_checkpoint_to_diffusers
    config = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM}
    return dict(convert(dict(native), config=config, qkv_layout=layout))


def make_outputs(base: BaseModel, sources: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Evaluate all expressions of the native family."""
    specs = {n: TensorSpec(tuple(t.shape), str(t.dtype)[6:]) for n, t in sources.items()}
    expressions = find_architecture(base.transformer_class).make_expressions(base, specs)
    assert {fqn for e in expressions.values() for fqn in list_inputs(e)} == set(sources)
    for name, expression in expressions.items():
        assert make_spec(expression, specs) == base.tensors[name], name
    return {name: evaluate(e, sources) for name, e in expressions.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None])
def test_native_package_from_a_checkpoint_is_bit_equal(
    base_dir: Path, dtype: torch.dtype | None
) -> None:
    """Catches stacked query/key/value, unswapped halves, a wrong name or a wrong dtype."""
    native = load_file(base_dir / "transformer/model.safetensors")
    sources = make_sources(native, layout="interleaved")
    sources = {n: t.to(dtype or t.dtype) for n, t in sources.items()}
    outputs = make_outputs(read(base_dir), sources)
    assert set(outputs) == set(native)
    for name, tensor in native.items():
        assert outputs[name].dtype == tensor.dtype, name
        assert torch.equal(outputs[name], tensor), name


def test_stacked_order_would_be_seen(base_dir: Path) -> None:
    """Catches a test above that cannot fail: the other row order must differ."""
    native = load_file(base_dir / "transformer/model.safetensors")
    outputs = make_outputs(read(base_dir), make_sources(native, layout="stacked"))
    name = "blocks.0.attn.qkv_proj.weight"
    assert not torch.equal(outputs[name], native[name])


def test_read_base_of_the_native_package(base_dir: Path) -> None:
    """Catches a native config compared with the trained class under other names."""
    base = read(base_dir)
    assert base.transformer_class == "MiniMaxH3DiTModel"
    assert base.trained_class == "MiniMaxH3Transformer3DModel"
    assert base.model_class_check == "passed"
    assert base.extra["weights_stem"] == "model"
    assert base.extra["artifact_type"] == "minimax_h3_pipeline"
    assert base.config["ffn_dim"] == FFN
    assert base.config["rope_theta"] == 10000.0
    assert base.config_defaults is not None
    assert set(base.config) - {"_class_name"} <= set(base.config_defaults)
    assert [f.path for f in base.replaced] == ["transformer/model.safetensors"]
    assert "video_vae/source/model.safetensors" in {f.path for f in base.files}


def test_interleave_and_swap_are_undone_exactly() -> None:
    """Catches an inverse that is not one; follows the row formula of the format."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(6, 5, generator=generator) for _ in range(3)]
    fuse = QKVInterleave(num_heads=3, head_dim=2)
    fused = fuse.apply(parts)
    for head in range(3):
        for j in range(3):
            for c in range(2):
                assert torch.equal(fused[head * 6 + j * 2 + c], parts[j][head * 2 + c])
    assert all(torch.equal(a, b) for a, b in zip(fuse.invert(fused), parts, strict=True))
    swap = SwapHalves()
    assert torch.equal(swap.apply([fused])[:9], fused[9:])
    assert torch.equal(swap.invert(swap.apply([fused]))[0], fused)


def test_expressions_of_equal_dtype_are_invertible(base_dir: Path) -> None:
    """Catches a published tensor that could not be traced to its source slices."""
    base = read(base_dir)
    native = load_file(base_dir / "transformer/model.safetensors")
    sources = make_sources(native, layout="interleaved")
    specs = {n: TensorSpec(tuple(t.shape), str(t.dtype)[6:]) for n, t in sources.items()}
    recovered: dict[str, torch.Tensor] = {}
    expressions = find_architecture(base.transformer_class).make_expressions(base, specs)
    for name, expression in expressions.items():
        if name != "rope.inv_freq":
            assert is_invertible(expression), name
            recovered |= invert(expression, native[name])
    assert set(recovered) == set(sources)
    assert all(torch.equal(recovered[name], sources[name]) for name in sources)


def test_operations_refuse_tensors_that_do_not_fit() -> None:
    """Catches shapes that a reshape would accept silently."""
    fuse = QKVInterleave(num_heads=2, head_dim=2)
    good, wide = TensorSpec((4, 3), "float32"), TensorSpec((4, 6), "float32")
    assert fuse.make_spec([good] * 3) == TensorSpec((12, 3), "float32")
    for operands in ([good, good], [good, good, wide], [TensorSpec((6, 3), "float32")] * 3):
        with pytest.raises(PlanError, match="cannot be fused"):
            fuse.make_spec(operands)
    with pytest.raises(PlanError, match="no halves"):
        SwapHalves().make_spec([TensorSpec((3, 2), "float32")])


def test_inverse_frequencies_equal_the_class_buffer() -> None:
    """Catches the power of a negative exponent, which differs in the last bits."""
    from diffusers.models.transformers import transformer_minimax_h3

    rope: Any = transformer_minimax_h3.MiniMaxH3RotaryPosEmbed
    computed = make_inverse_frequencies(16, theta=10000.0)
    assert torch.equal(computed, rope(16, 10000.0).inv_freq)
    operation = InverseFrequency(tuple(computed.tolist()))
    assert torch.equal(operation.apply([]), computed)
    assert operation.make_spec([]) == TensorSpec((16,), "float32")


def _index(**changes: Any) -> Callable[[Path], None]:
    def damage(base_dir: Path) -> None:
        (base_dir / "model_index.json").write_text(json.dumps({**INDEX, **changes}))

    return damage


def _config(**changes: Any) -> Callable[[Path], None]:
    def damage(base_dir: Path) -> None:
        (base_dir / "transformer/config.json").write_text(json.dumps({**CONFIG, **changes}))

    return damage


def _tensors(**changes: torch.Tensor) -> Callable[[Path], None]:
    def damage(base_dir: Path) -> None:
        tensors = {**make_native_tensors(), **changes}
        save_file(tensors, base_dir / "transformer/model.safetensors")

    return damage


def _modular(base_dir: Path) -> None:
    (base_dir / "modular_model_index.json").write_text("{}")


MISUSES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "partition": (
        _index(_minimax_h3={"schema_version": 1, "partition": "x", "tasks": ["t2va"]}),
        "pipeline-invalid",
        "`partition`",
    ),
    "no metadata": (
        _index(_minimax_h3={}),
        "pipeline-invalid",
        "`partition`, `schema_version`, `tasks`",
    ),
    "modular": (_modular, "pipeline-invalid", "modular"),
    "derived": (_config(adaln_out_features=1), "config-contradicts", "720"),
    "unknown field": (_config(new_flag=True), "config-field-unknown", "`new_flag`"),
    "layers": (_config(num_layers=3), "base-class-mismatch", "transformer_blocks.2"),
    "pruned": (_tensors(adaln_t_table=torch.zeros(2)), "base-class-mismatch", "adaln_t_table"),
    "heads": (_config(num_attention_heads=4), "base-class-mismatch", "out_proj"),
    "theta": (
        _tensors(**{"rope.inv_freq": torch.tensor([1.0, 0.02])}),
        "rope-theta-differs",
        "rope.inv_freq",
    ),
    "rope dtype": (
        _tensors(**{"rope.inv_freq": torch.ones(2, dtype=torch.bfloat16)}),
        "base-class-mismatch",
        "bfloat16",
    ),
}


@pytest.mark.parametrize("name", sorted(MISUSES))
def test_native_package_that_is_damaged_is_refused(base_dir: Path, name: str) -> None:
    """Catches a package that another reader would load wrongly or not at all."""
    damage, error_id, message = MISUSES[name]
    damage(base_dir)
    with pytest.raises(MergeError) as caught:
        read(base_dir)
    assert caught.value.error_id == error_id, str(caught.value)
    assert message in str(caught.value)


def test_native_package_for_a_lone_transformer_is_refused(base_dir: Path) -> None:
    """Catches native weights published as a Diffusers transformer."""
    with pytest.raises(BaseModelError, match="Diffusers|cannot be made") as caught:
        read(base_dir, output_format="transformer")
    assert caught.value.error_id == "format-unsupported"


def test_diffusers_transformer_is_its_own_base(tmp_path: Path) -> None:
    """Catches the Diffusers form refused, or made into a pipeline that does not exist."""
    from dist_merge.model_class import import_model_class

    architecture = find_architecture("MiniMaxH3Transformer3DModel")
    cls: Any = import_model_class(architecture.module, architecture.transformer_class)
    native = find_architecture("MiniMaxH3DiTModel")
    config = {n: v for n, v in native.make_config(CONFIG).items() if n != "_class_name"}
    cls(**config).save_pretrained(tmp_path / "base")
    base = read(tmp_path / "base", output_format="transformer")
    assert len(base.tensors) == 52
    assert set(base.keep_in_fp32) == set(architecture.keep_in_fp32)
    assert replace(base, extra={}).trained_class == base.transformer_class
