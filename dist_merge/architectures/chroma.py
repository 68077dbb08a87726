"""Chroma: Flux's relative with a T5 encoder alone."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import FLOW_MATCH, T5_TOKENIZER, IdentityArchitecture

_ADAPTER = {
    "image_encoder": ("CLIPVisionModelWithProjection",),
    "feature_extractor": ("CLIPImageProcessor",),
}
_SPEC = PipelineSpec(
    {
        "scheduler": FLOW_MATCH,
        "vae": ("AutoencoderKL",),
        "text_encoder": ("T5EncoderModel",),
        "tokenizer": T5_TOKENIZER,
        "transformer": ("ChromaTransformer2DModel",),
        **_ADAPTER,
    },
    optional=frozenset(_ADAPTER),
)

CHROMA = IdentityArchitecture(
    name="chroma",
    transformer_class="ChromaTransformer2DModel",
    module="diffusers.models.transformers.transformer_chroma",
    pipelines={
        "ChromaPipeline": _SPEC,
        "ChromaImg2ImgPipeline": _SPEC,
        "ChromaInpaintPipeline": _SPEC,
    },
)
