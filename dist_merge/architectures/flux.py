"""Flux.1 in all its pipelines."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import CLIP_TOKENIZER, FLOW_MATCH, T5_TOKENIZER, IdentityArchitecture

_BASIC = {
    "scheduler": FLOW_MATCH,
    "vae": ("AutoencoderKL",),
    "text_encoder": ("CLIPTextModel",),
    "tokenizer": CLIP_TOKENIZER,
    "text_encoder_2": ("T5EncoderModel",),
    "tokenizer_2": T5_TOKENIZER,
    "transformer": ("FluxTransformer2DModel",),
}
_IMAGE = {
    "image_encoder": ("CLIPVisionModelWithProjection",),
    "feature_extractor": ("CLIPImageProcessor",),
}
_CONTROL = {"controlnet": ("FluxControlNetModel", "FluxMultiControlNetModel")}
_PLAIN = PipelineSpec(_BASIC)
_WITH_IMAGE = PipelineSpec({**_BASIC, **_IMAGE}, optional=frozenset(_IMAGE))
_CLOZE = PipelineSpec(_BASIC, options={"resolution": (int,)})

FLUX = IdentityArchitecture(
    name="flux",
    transformer_class="FluxTransformer2DModel",
    module="diffusers.models.transformers.transformer_flux",
    pipelines={
        "FluxPipeline": _WITH_IMAGE,
        "FluxImg2ImgPipeline": _WITH_IMAGE,
        "FluxInpaintPipeline": _WITH_IMAGE,
        "FluxKontextPipeline": _WITH_IMAGE,
        "FluxKontextInpaintPipeline": _WITH_IMAGE,
        "FluxFillPipeline": _PLAIN,
        "FluxControlPipeline": _PLAIN,
        "FluxControlImg2ImgPipeline": _PLAIN,
        "FluxControlInpaintPipeline": _PLAIN,
        "FluxControlNetPipeline": PipelineSpec(
            {**_BASIC, **_IMAGE, **_CONTROL}, optional=frozenset(_IMAGE)
        ),
        "FluxControlNetImg2ImgPipeline": PipelineSpec({**_BASIC, **_CONTROL}),
        "FluxControlNetInpaintPipeline": PipelineSpec({**_BASIC, **_CONTROL}),
        "VisualClozePipeline": _CLOZE,
        "VisualClozeGenerationPipeline": _CLOZE,
    },
)
