"""CogVideoX. Learned positions, where the config asks for them, are a persistent buffer."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import FLOW_MATCH, T5_TOKENIZER, IdentityArchitecture

_SPEC = PipelineSpec(
    {
        "scheduler": FLOW_MATCH,
        "vae": ("AutoencoderKLCogVideoX",),
        "text_encoder": ("T5EncoderModel",),
        "tokenizer": T5_TOKENIZER,
        "transformer": ("CogVideoXTransformer3DModel",),
    }
)

COGVIDEOX = IdentityArchitecture(
    name="cogvideox",
    transformer_class="CogVideoXTransformer3DModel",
    module="diffusers.models.transformers.cogvideox_transformer_3d",
    pipelines={
        "CogVideoXPipeline": _SPEC,
        "CogVideoXImageToVideoPipeline": _SPEC,
        "CogVideoXVideoToVideoPipeline": _SPEC,
        "CogVideoXFunControlPipeline": _SPEC,
    },
)
