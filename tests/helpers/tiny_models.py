"""Tiny but real Diffusers pipelines: real classes, small configs, weights from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def make_transformer(*, seed: int = 0) -> Any:
    """A Qwen-Image transformer with 77 tensors and 89,064 parameters."""
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(seed)
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
    )


def make_inputs(*, dtype: torch.dtype = torch.float32, seed: int = 1) -> dict[str, Any]:
    """Inputs of one forward pass of `make_transformer`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, 6, 16, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(1, 5, 24, generator=generator).to(dtype),
        "encoder_hidden_states_mask": torch.ones(1, 5, dtype=torch.long),
        "timestep": torch.tensor([0.7], dtype=dtype),
        "img_shapes": [[(1, 2, 3)]],
    }


def run_forward(transformer: Any, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Output of one forward pass."""
    return transformer(**make_inputs(dtype=dtype)).sample


def run_reloaded(transformer: Any) -> torch.Tensor:
    """Output of a reloaded model, with the arithmetic of the training run.

    Matrix kernels sum in an order that depends on the threads and on the alignment of the weights;
    tensors mapped from a file lie at any 8-byte boundary, so they are copied to fresh memory.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for parameter in transformer.parameters():
            parameter.data = parameter.data.clone()
        with torch.no_grad():
            return run_forward(transformer)
    finally:
        torch.set_num_threads(threads)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with a vocabulary of single bytes."""
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    folder.mkdir(parents=True)
    letters = list(bytes_to_unicode().values())
    vocab = {letter: index for index, letter in enumerate([*letters, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = Qwen2Tokenizer(
        vocab_file=str(folder / "vocab.json"), merges_file=str(folder / "merges.txt")
    )
    tokenizer.save_pretrained(folder)


def make_vae() -> Any:
    """A Qwen-Image VAE of a few channels."""
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )


def make_text_encoder() -> Any:
    """A Qwen2.5-VL with one layer in text and vision."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 300,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]},
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 24,
        "fullatt_block_indexes": [0],
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    )


def build_pipeline(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Save a whole tiny Qwen-Image pipeline; returns its folder."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
    from diffusers.utils import logging
    from transformers import Qwen2Tokenizer

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    torch.manual_seed(seed)
    write_tokenizer(folder / "tokenizer")
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=make_vae(),
        text_encoder=make_text_encoder(),
        tokenizer=Qwen2Tokenizer.from_pretrained(folder / "tokenizer"),
        transformer=make_transformer(seed=seed).to(dtype),
    )
    pipeline.save_pretrained(folder)
    return folder
