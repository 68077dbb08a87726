"""Tiny but real pipelines of every family: real classes with small configs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .tiny_models import build_pipeline as build_qwen
from .tiny_models import run_forward as run_qwen
from .tiny_transformers import TINY_TRANSFORMERS, build

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BOOGU_PACKAGE = Path(__file__).parent / "boogu_stand_in"


def make_clip_tokenizer() -> Any:
    """A CLIP tokenizer of single letters."""
    from transformers import CLIPTokenizer

    pieces = [
        *LETTERS,
        *(f"{letter}</w>" for letter in LETTERS),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    return CLIPTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])


def make_t5_tokenizer() -> Any:
    """A T5 tokenizer of single letters."""
    from transformers import T5Tokenizer

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    letters = [(letter, -2.0 - index) for index, letter in enumerate(LETTERS)]
    return T5Tokenizer(vocab=[*special, *letters], extra_ids=0)


def make_gemma_tokenizer() -> Any:
    """A Gemma tokenizer of single letters."""
    from transformers import GemmaTokenizer

    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *LETTERS]
    return GemmaTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])


def make_clip_text(*, projected: bool) -> Any:
    """A CLIP text encoder with one layer."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, projection_dim=10,
        num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16,
        bos_token_id=52, eos_token_id=53, pad_token_id=53,
    )  # fmt: skip
    return CLIPTextModelWithProjection(config) if projected else CLIPTextModel(config)


def make_t5_text(name: str = "T5") -> Any:
    """A T5 or UMT5 encoder with one layer."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=40, d_model=20, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    return getattr(transformers, f"{name}EncoderModel")(config)


def make_clip_vision() -> Any:
    """A CLIP vision encoder with one layer."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    return CLIPVisionModel(config)


def make_kl_vae() -> Any:
    """An image VAE of a few channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(4,), latent_channels=4, norm_num_groups=2, layers_per_block=1
    )


def make_scheduler(**options: Any) -> Any:
    """A flow-matching scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**options)


def save(pipeline: Any, folder: Path, *, edit: dict[str, Any] | None = None) -> None:
    """Save a pipeline, then change entries of its index."""
    pipeline.save_pretrained(folder)
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(edit or {})}, indent=2))


def build_sd3(folder: Path) -> None:
    """SD3 with all three text encoders."""
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline(
        transformer=build("sd3"),
        scheduler=make_scheduler(shift=3.0),
        vae=make_kl_vae(),
        text_encoder=make_clip_text(projected=True),
        tokenizer=make_clip_tokenizer(),
        text_encoder_2=make_clip_text(projected=True),
        tokenizer_2=make_clip_tokenizer(),
        text_encoder_3=make_t5_text(),
        tokenizer_3=make_t5_tokenizer(),
    )
    # As published: the tokenizer's class under its older name.
    save(pipeline, folder, edit={"tokenizer_3": ["transformers", "T5TokenizerFast"]})


def build_flux(folder: Path) -> None:
    """Flux with both text encoders."""
    from diffusers import FluxPipeline

    pipeline = FluxPipeline(
        transformer=build("flux"),
        scheduler=make_scheduler(),
        vae=make_kl_vae(),
        text_encoder=make_clip_text(projected=False),
        tokenizer=make_clip_tokenizer(),
        text_encoder_2=make_t5_text(),
        tokenizer_2=make_t5_tokenizer(),
    )
    save(pipeline, folder)


def make_wan_vae() -> Any:
    """A Wan VAE of a few channels."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip


def build_wan(folder: Path) -> None:
    """Wan 2.2 as published for one transformer: 5B's options."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    pipeline = WanPipeline(
        transformer=build("wan"),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        vae=make_wan_vae(),
        text_encoder=make_t5_text("UMT5"),
        tokenizer=make_t5_tokenizer(),
        expand_timesteps=True,
    )
    save(pipeline, folder, edit={"transformer_2": [None, None], "boundary_ratio": None})


def build_wan_dual(folder: Path) -> None:
    """Wan 2.2 with two experts."""
    from diffusers import WanPipeline

    pipeline = WanPipeline(
        transformer=build("wan"),
        transformer_2=build("wan", seed=5),
        scheduler=make_scheduler(),
        vae=make_wan_vae(),
        text_encoder=make_t5_text("UMT5"),
        tokenizer=make_t5_tokenizer(),
        boundary_ratio=0.875,
    )
    save(pipeline, folder)


def build_wan_i2v(folder: Path) -> None:
    """Wan image to video with its image encoder; the processor's folder is made by hand."""
    from diffusers import WanPipeline

    pipeline = WanPipeline(
        transformer=build("wan"),
        scheduler=make_scheduler(),
        vae=make_wan_vae(),
        text_encoder=make_t5_text("UMT5"),
        tokenizer=make_t5_tokenizer(),
    )
    edit = {
        "_class_name": "WanImageToVideoPipeline",
        "image_encoder": ["transformers", "CLIPVisionModel"],
        "image_processor": ["transformers", "CLIPImageProcessor"],
    }
    save(pipeline, folder, edit=edit)
    make_clip_vision().save_pretrained(folder / "image_encoder")
    (folder / "image_processor").mkdir()
    processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 8}}
    (folder / "image_processor" / "preprocessor_config.json").write_text(json.dumps(processor))


def make_gemma3() -> Any:
    """A Gemma 3 with one layer in text and vision."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    )


def build_ltx2(folder: Path) -> None:
    """LTX-2 with audio VAE, connectors and vocoder."""
    from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2Pipeline
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    vae = AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(4, 4, 4, 4), decoder_block_out_channels=(4, 4, 4),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1),
        patch_size=2,
    )  # fmt: skip
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1, 1), num_res_blocks=1, latent_channels=2, mel_bins=8
    )
    connectors = LTX2TextConnectors(
        caption_channels=16, text_proj_in_factor=2,
        video_connector_num_attention_heads=2, video_connector_attention_head_dim=8,
        video_connector_num_layers=1, video_connector_num_learnable_registers=4,
        audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1, audio_connector_num_learnable_registers=4,
    )  # fmt: skip
    vocoder = LTX2Vocoder(
        in_channels=4, hidden_channels=8, upsample_kernel_sizes=[4], upsample_factors=[2],
        resnet_kernel_sizes=[3], resnet_dilations=[[1]],
    )  # fmt: skip
    pipeline = LTX2Pipeline(
        transformer=build("ltx2"),
        scheduler=make_scheduler(),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=make_gemma3(),
        tokenizer=make_gemma_tokenizer(),
        connectors=connectors,
        vocoder=vocoder,
    )
    save(pipeline, folder)


def build_qwen_edit(folder: Path) -> None:
    """Qwen-Image-Edit; the processor's folder is made by hand, its class needs torchvision."""
    build_qwen(folder)
    path = folder / "model_index.json"
    index = json.loads(path.read_text())
    index["_class_name"] = "QwenImageEditPipeline"
    index["processor"] = ["transformers", "Qwen2VLProcessor"]
    path.write_text(json.dumps(index, indent=2))
    shutil.copytree(folder / "tokenizer", folder / "processor")
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14}
    (folder / "processor" / "preprocessor_config.json").write_text(json.dumps(processor))


def build_boogu(folder: Path) -> None:
    """Boogu-Image as published: shims, index and files by hand, weights of the stand-in class."""
    from boogu.models.transformers.transformer_boogu import BooguImageTransformer2DModel

    torch.manual_seed(0)
    model = BooguImageTransformer2DModel(hidden_size=24, num_layers=2)
    model.save_pretrained(folder / "transformer")
    schedule = "scheduling_flow_match_euler_discrete_time_shifting"
    index = {
        "_class_name": "BooguImagePipeline",
        "_diffusers_version": "0.35.2",
        "mllm": ["transformers", "Qwen3VLForConditionalGeneration"],
        "processor": ["transformers", "Qwen3VLProcessor"],
        "scheduler": [schedule, "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["transformer_boogu", "BooguImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    shim = "from boogu.models.transformers.transformer_boogu import *  # noqa: F403\n"
    (folder / "transformer" / "transformer_boogu.py").write_text(shim)
    for name in ("scheduler", "processor", "mllm"):
        (folder / name).mkdir()
    (folder / "scheduler" / f"{schedule}.py").write_text("raise SystemExit('never run')\n")
    scheduler = {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "do_shift": True,
        "seq_len": 4096,
    }
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    (folder / "processor" / "preprocessor_config.json").write_text('{"patch_size": 2}')
    (folder / "mllm" / "config.json").write_text('{"model_type": "qwen3_vl"}')
    save_file({"a": torch.arange(4.0)}, folder / "mllm" / "model.safetensors")
    make_kl_vae().save_pretrained(folder / "vae")


PIPELINES: dict[str, Callable[[Path], None]] = {
    "qwen_edit": build_qwen_edit,
    "sd3": build_sd3,
    "flux": build_flux,
    "wan": build_wan,
    "wan_dual": build_wan_dual,
    "wan_i2v": build_wan_i2v,
    "ltx2": build_ltx2,
    "boogu": build_boogu,
}


def family_of(name: str) -> str:
    """Family of a pipeline's transformer."""
    return name.partition("_")[0]


def run_pipeline_forward(model: Any, name: str) -> list[torch.Tensor]:
    """Outputs of one forward pass of a pipeline's transformer."""
    family = family_of(name)
    if family == "qwen":
        return [run_qwen(model)]
    if family == "boogu":
        generator = torch.Generator().manual_seed(4)
        return [model(torch.randn(2, 5, 24, generator=generator))]
    outputs = model(**TINY_TRANSFORMERS[family].make_inputs(), return_dict=False)
    return [output for output in outputs if isinstance(output, torch.Tensor)]


def copy_without(folder: Path, target: Path, *names: str) -> Path:
    """A copy of a pipeline in which optional components are null."""
    shutil.copytree(folder, target)
    index = json.loads((target / "model_index.json").read_text())
    for name in names:
        index[name] = [None, None]
        shutil.rmtree(target / name, ignore_errors=True)
    (target / "model_index.json").write_text(json.dumps(index, indent=2))
    return target
