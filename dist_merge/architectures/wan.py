"""Wan 2.1 and 2.2, with one transformer or two experts, and Wan VACE.

With two experts `transformer` takes the noisy steps, `transformer_2` the others; the border is
`boundary_ratio` of the training steps. Files cannot tell which expert was trained.
"""

from __future__ import annotations

from ..contracts import PipelineSpec
from ..errors import BaseModelError
from ..records import BaseModel
from .identity import FLOW_MATCH, T5_TOKENIZER, IdentityArchitecture

_NONE = type(None)
_FP32 = ("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
_BASIC = {
    "scheduler": FLOW_MATCH,
    "vae": ("AutoencoderKLWan",),
    "text_encoder": ("UMT5EncoderModel",),
    "tokenizer": T5_TOKENIZER,
}
_IMAGE = {
    "image_encoder": ("CLIPVisionModel", "CLIPVisionModelWithProjection"),
    "image_processor": ("CLIPImageProcessor",),
}
_EXPERTS = frozenset({"transformer", "transformer_2"})
_OPTIONS = {"boundary_ratio": (float, _NONE), "expand_timesteps": (bool,)}


def _with_experts(class_name: str) -> dict[str, tuple[str, ...]]:
    return {**_BASIC, "transformer": (class_name,), "transformer_2": (class_name,)}


def check_experts(base: BaseModel) -> None:
    """Check that `boundary_ratio` is set where the pipeline has two experts.

    Raises:
        BaseModelError: It is not, or lies outside 0..1.
    """
    index = base.extra.get("model_index") or {}
    ratio = index.get("boundary_ratio")
    is_dual = all(index.get(name) not in (None, [None, None]) for name in _EXPERTS)
    if is_dual and not (ratio is not None and 0 < ratio < 1):
        raise BaseModelError(
            "pipeline-invalid",
            "a pipeline with two experts needs `boundary_ratio` between them",
            where="`model_index.json`",
            expected="a number between 0 and 1",
            found=repr(ratio),
            hint="take model_index.json from the published base",
        )


_TEXT = PipelineSpec(_with_experts("WanTransformer3DModel"), optional=_EXPERTS, options=_OPTIONS)

WAN = IdentityArchitecture(
    name="wan",
    transformer_class="WanTransformer3DModel",
    module="diffusers.models.transformers.transformer_wan",
    pipelines={
        "WanPipeline": _TEXT,
        "LucyEditPipeline": _TEXT,
        "WanImageToVideoPipeline": PipelineSpec(
            {**_with_experts("WanTransformer3DModel"), **_IMAGE},
            optional=_EXPERTS | frozenset(_IMAGE),
            options=_OPTIONS,
        ),
        "WanVideoToVideoPipeline": PipelineSpec(
            {**_BASIC, "transformer": ("WanTransformer3DModel",)}
        ),
    },
    keep_in_fp32=_FP32,
    check=check_experts,
)

WAN_VACE = IdentityArchitecture(
    name="wan_vace",
    transformer_class="WanVACETransformer3DModel",
    module="diffusers.models.transformers.transformer_wan_vace",
    pipelines={
        "WanVACEPipeline": PipelineSpec(
            _with_experts("WanVACETransformer3DModel"),
            optional=_EXPERTS,
            options={"boundary_ratio": (float, _NONE)},
        )
    },
    keep_in_fp32=_FP32,
    check=check_experts,
)
