"""Names and config fields of MiniMax H3: the native package's against those of Diffusers."""

from __future__ import annotations

import re

INV_FREQ = "rope.inv_freq"
ROPE_THETA = 10000.0
# Native name -> Diffusers name, outside the blocks; longer prefixes first.
PREFIXES = (
    ("video_patch_proj.", "proj_in."),
    ("audio_patch_proj.", "audio_proj_in."),
    ("condition_proj.", "context_embedder."),
    ("time_embedder.proj_in.", "time_embedder.linear_1."),
    ("time_embedder.proj_out.", "time_embedder.linear_2."),
    ("token_refiner.final_norm.", "token_refiner.final_norm."),
    ("final_layer.norm.", "norm_out.norm."),
    ("final_layer.adaln_proj.linear.", "norm_out.linear."),
    ("final_layer.video_out.", "proj_out."),
    ("final_layer.audio_out.", "audio_proj_out."),
)
BLOCK = re.compile(r"(blocks|token_refiner\.blocks)\.(0|[1-9]\d*)\.(.+)")
BLOCK_PREFIXES = {
    "blocks": "transformer_blocks",
    "token_refiner.blocks": "token_refiner.refiner_blocks",
}
IN_BLOCK = {
    "norm1.weight": "norm1.weight",
    "norm2.weight": "norm2.weight",
    "attn.q_norm.weight": "attn.norm_q.weight",
    "attn.k_norm.weight": "attn.norm_k.weight",
    "attn.out_proj.weight": "attn.to_out.0.weight",
    "mlp.fc2.weight": "ff.net.2.weight",
    "adaln_proj.linear.weight": "adaln_proj.linear.weight",
    "adaln_proj.linear.bias": "adaln_proj.linear.bias",
}
QKV = "attn.qkv_proj.weight"
GATED = "mlp.fc1.weight"
# Native config field -> Diffusers config field.
CONFIG_FIELDS = {
    "token_refiner_num_layers": "num_refiner_layers",
    "ffn_hidden_size": "ffn_dim",
    "latents_dim": "in_channels",
    "audio_latents_dim": "audio_in_channels",
    "timestep_input_dim": "freq_dim",
    "time_embed_hidden_size": "time_embed_hidden_dim",
    "rope_inv_freq_len": "rope_freq_dim",
}
SAME_FIELDS = (
    *("hidden_size", "num_layers", "num_attention_heads", "attention_head_dim", "patch_size"),
    *("text_dim", "time_embed_dim", "norm_eps", "qk_norm_eps", "final_norm_eps"),
)
DERIVED_FIELDS = {"adaln_out_features": 18, "final_adaln_out_features": 2}


def translate_name(native: str) -> tuple[str, ...] | None:
    """Return the Diffusers tensors a native tensor is made of; None for an unknown name.

    Three names are query, key and value, to be fused.
    """
    for prefix, ours in PREFIXES:
        if native.startswith(prefix) and native.removeprefix(prefix) in ("weight", "bias"):
            return (ours + native.removeprefix(prefix),)
    match = BLOCK.fullmatch(native)
    if match is None:
        return None
    prefix = f"{BLOCK_PREFIXES[match.group(1)]}.{match.group(2)}."
    rest = match.group(3)
    if rest == QKV:
        return tuple(f"{prefix}attn.to_{part}.weight" for part in "qkv")
    if rest == GATED:
        return (f"{prefix}ff.net.0.proj.weight",)
    return (prefix + IN_BLOCK[rest],) if rest in IN_BLOCK else None
