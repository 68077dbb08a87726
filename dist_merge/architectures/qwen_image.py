"""Qwen-Image: text to image, editing, layers, image to image, inpainting, ControlNet."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import FLOW_MATCH, QWEN_TOKENIZER, IdentityArchitecture

_BASIC = {
    "scheduler": FLOW_MATCH,
    "vae": ("AutoencoderKLQwenImage",),
    "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
    "tokenizer": QWEN_TOKENIZER,
    "transformer": ("QwenImageTransformer2DModel",),
}
_EDIT = {**_BASIC, "processor": ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "AutoProcessor")}
_CONTROL = {**_BASIC, "controlnet": ("QwenImageControlNetModel", "QwenImageMultiControlNetModel")}

QWEN_IMAGE = IdentityArchitecture(
    name="qwen_image",
    transformer_class="QwenImageTransformer2DModel",
    module="diffusers.models.transformers.transformer_qwenimage",
    pipelines={
        "QwenImagePipeline": PipelineSpec(_BASIC),
        "QwenImageImg2ImgPipeline": PipelineSpec(_BASIC),
        "QwenImageInpaintPipeline": PipelineSpec(_BASIC),
        "QwenImageEditPipeline": PipelineSpec(_EDIT),
        "QwenImageEditPlusPipeline": PipelineSpec(_EDIT),
        "QwenImageEditInpaintPipeline": PipelineSpec(_EDIT),
        "QwenImageLayeredPipeline": PipelineSpec(_EDIT),
        "QwenImageControlNetPipeline": PipelineSpec(_CONTROL),
        "QwenImageControlNetInpaintPipeline": PipelineSpec(_CONTROL),
    },
)

QWEN_IMAGE_21 = IdentityArchitecture(
    name="qwen_image_21",
    transformer_class="QwenImage21Transformer2DModel",
    module="diffusers.models.transformers.transformer_qwenimage21",
    pipelines={
        "QwenImage21Pipeline": PipelineSpec(
            {
                "scheduler": FLOW_MATCH,
                "vae": ("AutoencoderKLQwenImage21",),
                "text_encoder": ("Qwen3VLForConditionalGeneration",),
                "processor": ("Qwen3VLProcessor", "AutoProcessor"),
                "transformer": ("QwenImage21Transformer2DModel",),
            },
            options={"sample_sigmas": (list, type(None))},
        )
    },
)
