"""Z-Image and its relatives of the same transformer."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import FLOW_MATCH, QWEN_TOKENIZER, IdentityArchitecture

_BASIC = {
    "scheduler": FLOW_MATCH,
    "vae": ("AutoencoderKL",),
    "text_encoder": ("Qwen3*",),
    "tokenizer": QWEN_TOKENIZER,
    "transformer": ("ZImageTransformer2DModel",),
}
_SIGLIP = {"siglip": ("Siglip2VisionModel",), "siglip_processor": ("Siglip2ImageProcessor",)}
_CONTROL = {"controlnet": ("ZImageControlNetModel",)}
_PLAIN = PipelineSpec(_BASIC)
_CONTROLLED = PipelineSpec({**_BASIC, **_CONTROL})

Z_IMAGE = IdentityArchitecture(
    name="z_image",
    transformer_class="ZImageTransformer2DModel",
    module="diffusers.models.transformers.transformer_z_image",
    pipelines={
        "ZImagePipeline": _PLAIN,
        "ZImageImg2ImgPipeline": _PLAIN,
        "ZImageInpaintPipeline": _PLAIN,
        "ZImageOmniPipeline": PipelineSpec({**_BASIC, **_SIGLIP}),
        "ZImageControlNetPipeline": _CONTROLLED,
        "ZImageControlNetInpaintPipeline": _CONTROLLED,
    },
)
