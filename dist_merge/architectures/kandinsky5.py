"""Kandinsky 5, video and image. Its `tokenizer` is a processor."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import CLIP_TOKENIZER, FLOW_MATCH, IdentityArchitecture

_BASIC = {
    "scheduler": FLOW_MATCH,
    "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
    "tokenizer": ("Qwen2VLProcessor", "Qwen2_5_VLProcessor"),
    "text_encoder_2": ("CLIPTextModel",),
    "tokenizer_2": CLIP_TOKENIZER,
    "transformer": ("Kandinsky5Transformer3DModel",),
}
_VIDEO = PipelineSpec({**_BASIC, "vae": ("AutoencoderKLHunyuanVideo",)})
_IMAGE = PipelineSpec({**_BASIC, "vae": ("AutoencoderKL",)})

KANDINSKY5 = IdentityArchitecture(
    name="kandinsky5",
    transformer_class="Kandinsky5Transformer3DModel",
    module="diffusers.models.transformers.transformer_kandinsky",
    pipelines={
        "Kandinsky5T2VPipeline": _VIDEO,
        "Kandinsky5I2VPipeline": _VIDEO,
        "Kandinsky5T2IPipeline": _IMAGE,
        "Kandinsky5I2IPipeline": _IMAGE,
    },
    keep_in_fp32=("time_embeddings", "modulation", "visual_modulation", "text_modulation"),
)
