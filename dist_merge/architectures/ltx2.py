"""LTX-2: video with audio. Connectors and vocoder are classes of the pipeline's own module."""

from __future__ import annotations

from collections.abc import Mapping

from ..contracts import PipelineSpec
from .identity import FLOW_MATCH, IdentityArchitecture

_BASIC = {
    "scheduler": FLOW_MATCH,
    "vae": ("AutoencoderKLLTX2Video",),
    "audio_vae": ("AutoencoderKLLTX2Audio",),
    "text_encoder": ("Gemma3ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
    "tokenizer": ("GemmaTokenizer", "AutoTokenizer"),
    "connectors": ("LTX2TextConnectors",),
    "vocoder": ("LTX2Vocoder", "LTX2VocoderWithBWE"),
    "transformer": ("LTX2VideoTransformer3DModel",),
}
_AUDIO = {"audio_scheduler": FLOW_MATCH}
_PROMPT = {"processor": ("*Processor",), "prompt_enhancer": ("Gemma4ForConditionalGeneration",)}
_DURATION = {"duration_head": ("LTX2DurationHead",)}
_UPSAMPLER = {"temporal_latent_upsampler": ("LTX2LatentUpsamplerModel",)}


def _make(
    *optional: Mapping[str, tuple[str, ...]],
    needed: Mapping[str, tuple[str, ...]] | None = None,
    options: Mapping[str, tuple[type, ...]] | None = None,
) -> PipelineSpec:
    extra = {name: classes for part in optional for name, classes in part.items()}
    return PipelineSpec(
        {**_BASIC, **(needed or {}), **extra},
        optional=frozenset(extra),
        options=options or {},
        libraries=frozenset({"ltx2"}),
    )


LTX2 = IdentityArchitecture(
    name="ltx2",
    transformer_class="LTX2VideoTransformer3DModel",
    module="diffusers.models.transformers.transformer_ltx2",
    pipelines={
        "LTX2Pipeline": _make(_PROMPT, _DURATION),
        "LTX2ImageToVideoPipeline": _make(_PROMPT, _DURATION),
        "LTX2DFRPipeline": _make(_PROMPT, _DURATION),
        "LTX2ConditionPipeline": _make(_AUDIO, _PROMPT, _DURATION),
        "LTX2InContextPipeline": _make(_AUDIO, _PROMPT),
        "LTX2HDRPipeline": _make(_AUDIO, options={"hdr_transform": (str,)}),
        "LTX2DFRTemporalRefinePipeline": _make(needed=_UPSAMPLER),
    },
)
