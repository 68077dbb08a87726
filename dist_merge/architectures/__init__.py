"""Table of the model families. To add one: a file here, a line below, its tests."""

from __future__ import annotations

from ..contracts import Architecture
from ..errors import BaseModelError, make_list
from .boogu import BOOGU
from .chroma import CHROMA
from .cogvideox import COGVIDEOX
from .cosmos import COSMOS
from .flux import FLUX
from .flux2 import FLUX2
from .hidream import HIDREAM
from .hunyuan_video15 import HUNYUAN_VIDEO15
from .kandinsky5 import KANDINSKY5
from .ltx2 import LTX2
from .minimax_h3 import MINIMAX_H3, MINIMAX_H3_NATIVE
from .ovis_image import OVIS_IMAGE
from .qwen_image import QWEN_IMAGE, QWEN_IMAGE_21
from .sana import SANA, SANA_VIDEO
from .sd3 import SD3
from .wan import WAN, WAN_VACE
from .z_image import Z_IMAGE

ARCHITECTURES: tuple[Architecture, ...] = (
    QWEN_IMAGE,
    QWEN_IMAGE_21,
    SD3,
    FLUX,
    FLUX2,
    WAN,
    WAN_VACE,
    LTX2,
    MINIMAX_H3,
    MINIMAX_H3_NATIVE,
    BOOGU,
    Z_IMAGE,
    HUNYUAN_VIDEO15,
    COGVIDEOX,
    OVIS_IMAGE,
    SANA,
    SANA_VIDEO,
    CHROMA,
    HIDREAM,
    COSMOS,
    KANDINSKY5,
)


def find_architecture(transformer_class: str) -> Architecture:
    """Return the family of a transformer class.

    Raises:
        BaseModelError: The class is not registered.
    """
    for architecture in ARCHITECTURES:
        if architecture.transformer_class == transformer_class:
            return architecture
    raise BaseModelError(
        "architecture-unknown",
        f"transformer class `{transformer_class}` is not registered",
        expected=make_list((a.transformer_class for a in ARCHITECTURES), limit=40),
        hint="the class is read from `_class_name` in the transformer's config.json",
    )


def find_trained(class_name: str) -> Architecture | None:
    """Return the family whose live module is of this class; None where none is."""
    found = (a for a in ARCHITECTURES if class_name == a.trained_class == a.transformer_class)
    return next(found, None)


def find_by_pipeline(pipeline_class: str) -> Architecture:
    """Return the family that declares a pipeline class.

    Raises:
        BaseModelError: No family declares it.
    """
    for architecture in ARCHITECTURES:
        if pipeline_class in architecture.pipelines:
            return architecture
    raise BaseModelError(
        "architecture-unknown",
        f"pipeline class `{pipeline_class}` is not registered",
        expected=make_list((p for a in ARCHITECTURES for p in a.pipelines), limit=80),
        hint="the class is read from `_class_name` in model_index.json",
    )
