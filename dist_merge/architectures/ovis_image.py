"""Ovis-Image."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import FLOW_MATCH, QWEN_TOKENIZER, IdentityArchitecture

OVIS_IMAGE = IdentityArchitecture(
    name="ovis_image",
    transformer_class="OvisImageTransformer2DModel",
    module="diffusers.models.transformers.transformer_ovis_image",
    pipelines={
        "OvisImagePipeline": PipelineSpec(
            {
                "scheduler": FLOW_MATCH,
                "vae": ("AutoencoderKL",),
                "text_encoder": ("Qwen3Model",),
                "tokenizer": QWEN_TOKENIZER,
                "transformer": ("OvisImageTransformer2DModel",),
            }
        )
    },
)
