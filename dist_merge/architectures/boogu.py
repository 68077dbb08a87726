"""Boogu-Image: classes of the package `boogu`, loaded through small Python files in the folders.

The index names those files (without `.py`) as libraries. They are copied with the folders they
lie in. The scheduler has the name of Diffusers' own but other fields, so its config is copied too.
"""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import IdentityArchitecture

_SPEC = PipelineSpec(
    {
        "mllm": ("Qwen3VLForConditionalGeneration",),
        "processor": ("Qwen3VLProcessor",),
        "scheduler": ("FlowMatchEulerDiscreteScheduler",),
        "transformer": ("BooguImageTransformer2DModel",),
        "vae": ("AutoencoderKL",),
        "prompt_embedding": ("PromptEmbedding",),
    },
    optional=frozenset({"prompt_embedding"}),
    libraries=frozenset(
        {"transformer_boogu", "scheduling_flow_match_euler_discrete_time_shifting"}
    ),
)

BOOGU = IdentityArchitecture(
    name="boogu",
    transformer_class="BooguImageTransformer2DModel",
    module="boogu.models.transformers.transformer_boogu",
    pipelines={"BooguImagePipeline": _SPEC, "BooguImageTurboPipeline": _SPEC},
)
