"""Cosmos 1, 2 and 2.5 of the CosmosTransformer3DModel."""

from __future__ import annotations

from ..contracts import PipelineSpec
from .identity import FLOW_MATCH, QWEN_TOKENIZER, T5_TOKENIZER, IdentityArchitecture

_CHECKER = frozenset({"safety_checker"})
_ANY = {
    "scheduler": FLOW_MATCH,
    "transformer": ("CosmosTransformer3DModel",),
    "safety_checker": ("CosmosSafetyChecker",),
}
_T5 = {**_ANY, "text_encoder": ("T5EncoderModel",), "tokenizer": T5_TOKENIZER}
_FIRST = PipelineSpec({**_T5, "vae": ("AutoencoderKLCosmos",)}, optional=_CHECKER)
_SECOND = PipelineSpec({**_T5, "vae": ("AutoencoderKLWan",)}, optional=_CHECKER)
_QWEN = {
    **_ANY,
    "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
    "tokenizer": QWEN_TOKENIZER,
    "vae": ("AutoencoderKLWan",),
}

COSMOS = IdentityArchitecture(
    name="cosmos",
    transformer_class="CosmosTransformer3DModel",
    module="diffusers.models.transformers.transformer_cosmos",
    pipelines={
        "CosmosTextToWorldPipeline": _FIRST,
        "CosmosVideoToWorldPipeline": _FIRST,
        "Cosmos2TextToImagePipeline": _SECOND,
        "Cosmos2VideoToWorldPipeline": _SECOND,
        "Cosmos2_5_PredictBasePipeline": PipelineSpec(_QWEN, optional=_CHECKER),
        "Cosmos2_5_TransferPipeline": PipelineSpec(
            {**_QWEN, "controlnet": ("CosmosControlNetModel",)}, optional=_CHECKER
        ),
    },
    keep_in_fp32=("learnable_pos_embed",),
)
