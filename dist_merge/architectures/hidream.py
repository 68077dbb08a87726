"""HiDream-I1 with its four text encoders."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import CLIP_TOKENIZER, FLOW_MATCH, T5_TOKENIZER, IdentityArchitecture

HIDREAM = IdentityArchitecture(
    name="hidream",
    transformer_class="HiDreamImageTransformer2DModel",
    module="diffusers.models.transformers.transformer_hidream_image",
    pipelines={
        "HiDreamImagePipeline": PipelineSpec(
            {
                "scheduler": FLOW_MATCH,
                "vae": ("AutoencoderKL",),
                "text_encoder": ("CLIPTextModelWithProjection",),
                "tokenizer": CLIP_TOKENIZER,
                "text_encoder_2": ("CLIPTextModelWithProjection",),
                "tokenizer_2": CLIP_TOKENIZER,
                "text_encoder_3": ("T5EncoderModel",),
                "tokenizer_3": T5_TOKENIZER,
                "text_encoder_4": ("LlamaForCausalLM",),
                "tokenizer_4": (
                    "PreTrainedTokenizer",
                    "LlamaTokenizer",
                    "TokenizersBackend",
                    "AutoTokenizer",
                ),
                "transformer": ("HiDreamImageTransformer2DModel",),
            }
        )
    },
)
