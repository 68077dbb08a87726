"""HunyuanVideo 1.5, text and image to video. Its guider is a component with a config only."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import FLOW_MATCH, QWEN_TOKENIZER, IdentityArchitecture

_BASIC = {
    "scheduler": FLOW_MATCH,
    "vae": ("AutoencoderKLHunyuanVideo15",),
    "text_encoder": ("Qwen2_5_VLTextModel",),
    "tokenizer": QWEN_TOKENIZER,
    "text_encoder_2": ("T5EncoderModel",),
    "tokenizer_2": ("ByT5Tokenizer",),
    "guider": ("ClassifierFreeGuidance",),
    "transformer": ("HunyuanVideo15Transformer3DModel",),
}
_IMAGE = {
    "image_encoder": ("SiglipVisionModel", "SiglipModel"),
    "feature_extractor": ("SiglipImageProcessor",),
}

HUNYUAN_VIDEO15 = IdentityArchitecture(
    name="hunyuan_video15",
    transformer_class="HunyuanVideo15Transformer3DModel",
    module="diffusers.models.transformers.transformer_hunyuan_video15",
    pipelines={
        "HunyuanVideo15Pipeline": PipelineSpec(_BASIC),
        "HunyuanVideo15ImageToVideoPipeline": PipelineSpec({**_BASIC, **_IMAGE}),
    },
)
