"""Tiny transformers of the further families: constructor arguments and forward inputs."""

from __future__ import annotations

from typing import Any

import torch

from .tiny_transformers import TinyTransformer, draw


def ones(*shape: int) -> torch.Tensor:
    """A mask of ones."""
    return torch.ones(*shape, dtype=torch.long)


def qwen_image_21_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 8, 8),
        "encoder_hidden_states": draw(1, 5, 24),
        "encoder_hidden_states_mask": ones(1, 5),
        "timestep": torch.tensor([0.7]),
        "img_shapes": [[(1, 2, 4)]],
        "img_mask": torch.tensor([[False] * 5 + [True] * 2]),
    }


def flux2_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 6, 8),
        "encoder_hidden_states": draw(1, 5, 24),
        "timestep": torch.tensor([0.7]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(6, 4),
        "txt_ids": torch.zeros(5, 4),
    }


def wan_vace_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 4, 2, 4, 4),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": draw(1, 5, 20),
        "control_hidden_states": draw(1, 6, 2, 4, 4),
    }


def wan_i2v_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 9, 2, 4, 4),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": draw(1, 5, 20),
        "encoder_hidden_states_image": draw(1, 3, 10),
    }


def z_image_inputs() -> dict[str, Any]:
    return {"x": [draw(4, 1, 4, 4)], "t": torch.tensor([0.5]), "cap_feats": [draw(5, 20)]}


def hunyuan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 5, 1, 4, 4),
        "timestep": torch.tensor([3.0]),
        "encoder_hidden_states": draw(1, 5, 20),
        "encoder_attention_mask": ones(1, 5),
        "encoder_hidden_states_2": draw(1, 4, 12),
        "encoder_attention_mask_2": ones(1, 4),
        "image_embeds": torch.zeros(1, 3, 10),
    }


def cogvideox_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 2, 4, 4, 4),
        "encoder_hidden_states": draw(1, 5, 20),
        "timestep": torch.tensor([3]),
    }


def ovis_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 6, 8),
        "encoder_hidden_states": draw(1, 5, 24),
        "timestep": torch.tensor([0.7]),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def sana_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 4, 8, 8),
        "encoder_hidden_states": draw(1, 5, 12),
        "timestep": torch.tensor([3.0]),
    }


def sana_video_inputs() -> dict[str, Any]:
    return {**sana_inputs(), "hidden_states": draw(1, 4, 2, 4, 4)}


def hidream_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 4, 8, 8),
        "timesteps": torch.tensor([3.0]),
        "encoder_hidden_states_t5": draw(1, 5, 20),
        "encoder_hidden_states_llama3": draw(2, 1, 5, 12),
        "pooled_embeds": draw(1, 16),
    }


def cosmos_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 4, 2, 4, 4),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": draw(1, 5, 20),
        "fps": 24,
    }


def kandinsky_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 2, 4, 4, 4),
        "encoder_hidden_states": draw(1, 5, 20),
        "timestep": torch.tensor([3.0]),
        "pooled_projections": draw(1, 12),
        "visual_rope_pos": [torch.arange(2)] * 3,
        "text_rope_pos": torch.arange(5),
    }


_WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
    "out_channels": 4, "text_dim": 20, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2,
    "rope_max_seq_len": 32,
}  # fmt: skip

TINY_SIBLINGS = {
    "qwen_image_21": TinyTransformer(
        "QwenImage21Transformer2DModel",
        {
            "patch_size": 1, "in_channels": 8, "out_channels": 8, "num_layers": 2,
            "attention_head_dim": 16, "num_attention_heads": 2, "context_in_dim": 24,
            "mlp_ratio": 2, "axes_dims_rope": (4, 6, 6),
        },
        qwen_image_21_inputs,
    ),
    "flux2": TinyTransformer(
        "Flux2Transformer2DModel",
        {
            "patch_size": 1, "in_channels": 8, "num_layers": 1, "num_single_layers": 2,
            "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24,
            "timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4),
        },
        flux2_inputs,
    ),
    "wan_vace": TinyTransformer(
        "WanVACETransformer3DModel",
        {**_WAN, "vace_layers": [0, 1], "vace_in_channels": 6},
        wan_vace_inputs,
    ),
    "wan_i2v_21": TinyTransformer(
        "WanTransformer3DModel",
        {**_WAN, "in_channels": 9, "image_dim": 10, "added_kv_proj_dim": 24},
        wan_i2v_inputs,
    ),
    "z_image": TinyTransformer(
        "ZImageTransformer2DModel",
        {
            "in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2,
            "n_kv_heads": 2, "cap_feat_dim": 20, "axes_dims": [4, 6, 6],
            "axes_lens": [64, 32, 32],
        },
        z_image_inputs,
    ),
    "hunyuan_video15": TinyTransformer(
        "HunyuanVideo15Transformer3DModel",
        {
            "in_channels": 5, "out_channels": 4, "num_attention_heads": 2,
            "attention_head_dim": 16, "num_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 2,
            "text_embed_dim": 20, "text_embed_2_dim": 12, "image_embed_dim": 10,
            "rope_axes_dim": (4, 6, 6), "target_size": 16, "task_type": "t2v",
        },
        hunyuan_inputs,
    ),
    "cogvideox": TinyTransformer(
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4,
            "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 20, "num_layers": 2,
            "sample_width": 4, "sample_height": 4, "sample_frames": 5, "patch_size": 2,
            "max_text_seq_length": 5,
        },
        cogvideox_inputs,
    ),
    "ovis_image": TinyTransformer(
        "OvisImageTransformer2DModel",
        {
            "in_channels": 8, "out_channels": 8, "num_layers": 1, "num_single_layers": 2,
            "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24,
            "axes_dims_rope": (4, 6, 6),
        },
        ovis_inputs,
    ),
    "sana": TinyTransformer(
        "SanaTransformer2DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
            "attention_head_dim": 8, "num_layers": 2, "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 12,
            "sample_size": 8, "patch_size": 1,
        },
        sana_inputs,
    ),
    "sana_video": TinyTransformer(
        "SanaVideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
            "attention_head_dim": 12, "num_layers": 2, "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 12, "cross_attention_dim": 24, "caption_channels": 12,
            "sample_size": 8, "rope_max_seq_len": 32,
        },
        sana_video_inputs,
    ),
    "chroma": TinyTransformer(
        "ChromaTransformer2DModel",
        {
            "in_channels": 8, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6),
            "approximator_num_channels": 8, "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        ovis_inputs,
    ),
    "hidream": TinyTransformer(
        "HiDreamImageTransformer2DModel",
        {
            "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1,
            "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
            "caption_channels": [20, 12], "text_emb_dim": 16, "num_routed_experts": 2,
            "num_activated_experts": 1, "axes_dims_rope": (8, 4, 4), "max_resolution": (8, 8),
            "llama_layers": (0, 1), "force_inference_output": True,
        },
        hidream_inputs,
    ),
    "cosmos": TinyTransformer(
        "CosmosTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
            "attention_head_dim": 16, "num_layers": 2, "mlp_ratio": 2, "text_embed_dim": 20,
            "adaln_lora_dim": 4, "max_size": (4, 8, 8), "extra_pos_embed_type": "learnable",
            "concat_padding_mask": False,
        },
        cosmos_inputs,
    ),
    "kandinsky5": TinyTransformer(
        "Kandinsky5Transformer3DModel",
        {
            "in_visual_dim": 4, "in_text_dim": 20, "in_text_dim2": 12, "time_dim": 16,
            "out_visual_dim": 4, "patch_size": (1, 2, 2), "model_dim": 32, "ff_dim": 48,
            "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 6, 6),
        },
        kandinsky_inputs,
    ),
}  # fmt: skip
