"""Stable Diffusion 3 and 3.5. The positions `pos_embed.pos_embed` are a persistent buffer."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import CLIP_TOKENIZER, FLOW_MATCH, T5_TOKENIZER, IdentityArchitecture

_BASIC = {
    "scheduler": FLOW_MATCH,
    "vae": ("AutoencoderKL",),
    "text_encoder": ("CLIPTextModelWithProjection",),
    "tokenizer": CLIP_TOKENIZER,
    "text_encoder_2": ("CLIPTextModelWithProjection",),
    "tokenizer_2": CLIP_TOKENIZER,
    "text_encoder_3": ("T5EncoderModel",),
    "tokenizer_3": T5_TOKENIZER,
    "transformer": ("SD3Transformer2DModel",),
}
_IMAGE = {
    "image_encoder": ("SiglipVisionModel", "SiglipModel"),
    "feature_extractor": ("SiglipImageProcessor",),
}
_CONTROL = {"controlnet": ("SD3ControlNetModel", "SD3MultiControlNetModel")}
_WITH_IMAGE = PipelineSpec({**_BASIC, **_IMAGE}, optional=frozenset(_IMAGE))
_WITH_CONTROL = PipelineSpec({**_BASIC, **_IMAGE, **_CONTROL}, optional=frozenset(_IMAGE))
_PAG = PipelineSpec(_BASIC, options={"pag_applied_layers": (str, list)})

SD3 = IdentityArchitecture(
    name="sd3",
    transformer_class="SD3Transformer2DModel",
    module="diffusers.models.transformers.transformer_sd3",
    pipelines={
        "StableDiffusion3Pipeline": _WITH_IMAGE,
        "StableDiffusion3Img2ImgPipeline": _WITH_IMAGE,
        "StableDiffusion3InpaintPipeline": _WITH_IMAGE,
        "StableDiffusion3ControlNetPipeline": _WITH_CONTROL,
        "StableDiffusion3ControlNetInpaintingPipeline": _WITH_CONTROL,
        "StableDiffusion3PAGPipeline": _PAG,
        "StableDiffusion3PAGImg2ImgPipeline": _PAG,
    },
)
