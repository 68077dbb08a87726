"""Flux.2 dev and Klein."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import FLOW_MATCH, QWEN_TOKENIZER, IdentityArchitecture

_BASIC = {
    "scheduler": FLOW_MATCH,
    "vae": ("AutoencoderKLFlux2",),
    "transformer": ("Flux2Transformer2DModel",),
}
_DEV = PipelineSpec(
    {
        **_BASIC,
        "text_encoder": ("Mistral3ForConditionalGeneration",),
        "tokenizer": ("*Processor", "*Tokenizer"),
    }
)
_KLEIN = PipelineSpec(
    {**_BASIC, "text_encoder": ("Qwen3ForCausalLM",), "tokenizer": QWEN_TOKENIZER},
    options={"is_distilled": (bool,)},
)

FLUX2 = IdentityArchitecture(
    name="flux2",
    transformer_class="Flux2Transformer2DModel",
    module="diffusers.models.transformers.transformer_flux2",
    pipelines={
        "Flux2Pipeline": _DEV,
        "Flux2KleinPipeline": _KLEIN,
        "Flux2KleinKVPipeline": _KLEIN,
        "Flux2KleinInpaintPipeline": _KLEIN,
    },
)
