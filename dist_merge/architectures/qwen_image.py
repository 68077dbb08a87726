"""Qwen-Image, Qwen-Image-Edit, Edit-Plus, Layered and the other pipelines of its transformer."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import IdentityArchitecture

COMPONENTS = {
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
    "vae": ("AutoencoderKLQwenImage",),
    "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "transformer": ("QwenImageTransformer2DModel",),
}
PROCESSOR = {"processor": ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")}
CONTROLNET = {"controlnet": ("QwenImageControlNetModel", "QwenImageMultiControlNetModel")}

QWEN_IMAGE = IdentityArchitecture(
    name="Qwen-Image",
    transformer_class="QwenImageTransformer2DModel",
    pipelines={
        "QwenImagePipeline": PipelineSpec(COMPONENTS),
        "QwenImageImg2ImgPipeline": PipelineSpec(COMPONENTS),
        "QwenImageInpaintPipeline": PipelineSpec(COMPONENTS),
        "QwenImageEditPipeline": PipelineSpec({**COMPONENTS, **PROCESSOR}),
        "QwenImageEditPlusPipeline": PipelineSpec({**COMPONENTS, **PROCESSOR}),
        "QwenImageEditInpaintPipeline": PipelineSpec({**COMPONENTS, **PROCESSOR}),
        "QwenImageLayeredPipeline": PipelineSpec({**COMPONENTS, **PROCESSOR}),
        "QwenImageControlNetPipeline": PipelineSpec({**COMPONENTS, **CONTROLNET}),
        "QwenImageControlNetInpaintPipeline": PipelineSpec({**COMPONENTS, **CONTROLNET}),
    },
)
