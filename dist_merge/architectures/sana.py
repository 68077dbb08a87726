"""Sana, Sana-Sprint and SANA-Video."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import FLOW_MATCH, IdentityArchitecture

_TEXT = {
    "scheduler": FLOW_MATCH,
    "text_encoder": ("Gemma2*",),
    "tokenizer": ("GemmaTokenizer", "AutoTokenizer"),
}
_IMAGE = {**_TEXT, "vae": ("AutoencoderDC",), "transformer": ("SanaTransformer2DModel",)}
_VIDEO = {
    **_TEXT,
    "vae": ("AutoencoderDC", "AutoencoderKLLTX2Video", "AutoencoderKLWan"),
    "transformer": ("SanaVideoTransformer3DModel",),
}

SANA = IdentityArchitecture(
    name="sana",
    transformer_class="SanaTransformer2DModel",
    module="diffusers.models.transformers.sana_transformer",
    pipelines={
        "SanaPipeline": PipelineSpec(_IMAGE),
        "SanaPAGPipeline": PipelineSpec(_IMAGE, options={"pag_applied_layers": (str, list)}),
        "SanaControlNetPipeline": PipelineSpec({**_IMAGE, "controlnet": ("SanaControlNetModel",)}),
        "SanaSprintPipeline": PipelineSpec(_IMAGE),
        "SanaSprintImg2ImgPipeline": PipelineSpec(_IMAGE),
    },
)

SANA_VIDEO = IdentityArchitecture(
    name="sana_video",
    transformer_class="SanaVideoTransformer3DModel",
    module="diffusers.models.transformers.transformer_sana_video",
    pipelines={
        "SanaVideoPipeline": PipelineSpec(_VIDEO),
        "SanaImageToVideoPipeline": PipelineSpec(_VIDEO),
    },
)
