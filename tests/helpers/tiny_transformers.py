"""Tiny transformers of the registered families: constructor arguments and forward inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TinyTransformer:
    """One Diffusers class with a small config and inputs it accepts."""

    class_name: str
    config: dict[str, Any]
    make_inputs: Callable[[], dict[str, Any]]


def draw(*shape: int) -> torch.Tensor:
    """Random inputs, the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def sd3_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 4, 8, 8),
        "encoder_hidden_states": draw(1, 5, 24),
        "pooled_projections": draw(1, 20),
        "timestep": torch.tensor([3.0]),
    }


def flux_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 6, 8),
        "encoder_hidden_states": draw(1, 5, 24),
        "pooled_projections": draw(1, 20),
        "timestep": torch.tensor([0.7]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def wan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 4, 2, 4, 4),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": draw(1, 5, 20),
    }


def ltx2_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 8, 6),
        "audio_hidden_states": draw(1, 5, 4),
        "encoder_hidden_states": draw(1, 3, 12),
        "audio_encoder_hidden_states": draw(1, 3, 12),
        "timestep": torch.tensor([0.5]),
        "audio_timestep": torch.tensor([0.5]),
        "num_frames": 2,
        "height": 2,
        "width": 2,
        "audio_num_frames": 5,
    }


def h3_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 4, 24),
        "audio_hidden_states": draw(1, 2, 5),
        "encoder_hidden_states": draw(1, 3, 12),
        "timestep": torch.tensor([0.4]),
        "timestep_indices": torch.zeros(9, dtype=torch.long),
        "token_tags": torch.tensor([1, 1, 1, 0, 0, 0, 0, 2, 2]),
        "position_ids": torch.zeros(9, 3),
        "video_indices": torch.arange(3, 7),
        "audio_indices": torch.arange(7, 9),
        "text_indices": torch.arange(0, 3),
    }


TINY_TRANSFORMERS = {
    "sd3": TinyTransformer(
        "SD3Transformer2DModel",
        {
            "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4,
            "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
            "joint_attention_dim": 24, "caption_projection_dim": 32,
            "pooled_projection_dim": 20, "pos_embed_max_size": 8,
            "dual_attention_layers": (0,), "qk_norm": "rms_norm",
        },
        sd3_inputs,
    ),
    "flux": TinyTransformer(
        "FluxTransformer2DModel",
        {
            "patch_size": 1, "in_channels": 8, "num_layers": 1, "num_single_layers": 2,
            "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24,
            "pooled_projection_dim": 20, "guidance_embeds": True, "axes_dims_rope": (4, 6, 6),
        },
        flux_inputs,
    ),
    "wan": TinyTransformer(
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12,
            "in_channels": 4, "out_channels": 4, "text_dim": 20, "freq_dim": 16, "ffn_dim": 32,
            "num_layers": 2, "rope_max_seq_len": 32,
        },
        wan_inputs,
    ),
    "ltx2": TinyTransformer(
        "LTX2VideoTransformer3DModel",
        {
            "in_channels": 6, "out_channels": 6, "num_attention_heads": 2,
            "attention_head_dim": 8, "cross_attention_dim": 16, "vae_scale_factors": (1, 1, 1),
            "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 4, "audio_cross_attention_dim": 8, "num_layers": 2,
            "caption_channels": 12,
        },
        ltx2_inputs,
    ),
    "minimax_h3": TinyTransformer(
        "MiniMaxH3Transformer3DModel",
        {
            "num_attention_heads": 3, "attention_head_dim": 16, "hidden_size": 40,
            "num_layers": 2, "num_refiner_layers": 1, "ffn_dim": 24, "in_channels": 6,
            "audio_in_channels": 5, "text_dim": 12, "freq_dim": 8,
            "time_embed_hidden_dim": 20, "time_embed_dim": 14, "rope_freq_dim": 2,
        },
        h3_inputs,
    ),
}  # fmt: skip


def list_all() -> dict[str, TinyTransformer]:
    """The families with a pipeline of their own in the tests, and their siblings."""
    from .tiny_siblings import TINY_SIBLINGS

    return {**TINY_TRANSFORMERS, **TINY_SIBLINGS}


def build(name: str, *, seed: int = 0) -> Any:
    """Build one tiny transformer with weights from a seed."""
    import diffusers

    tiny = list_all()[name]
    torch.manual_seed(seed)
    return getattr(diffusers, tiny.class_name)(**tiny.config)


def run_forward(model: Any, name: str) -> list[torch.Tensor]:
    """Outputs of one forward pass."""
    outputs = model(**list_all()[name].make_inputs(), return_dict=False)
    flat = [
        part for output in outputs for part in (output if isinstance(output, list) else [output])
    ]
    return [output for output in flat if isinstance(output, torch.Tensor)]
