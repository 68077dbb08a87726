"""Families of models; one file each, one line in the table."""

from __future__ import annotations

from ..contracts import Architecture
from ..errors import BaseModelError
from .qwen_image import QWEN_IMAGE

ARCHITECTURES: tuple[Architecture, ...] = (QWEN_IMAGE,)


def find_architecture(transformer_class: str) -> Architecture:
    """Return the family of a transformer class.

    Raises:
        BaseModelError: It is not registered; the message lists what is.
    """
    for architecture in ARCHITECTURES:
        if architecture.transformer_class == transformer_class:
            return architecture
    known = ", ".join(f"{a.transformer_class} ({a.name})" for a in ARCHITECTURES)
    raise BaseModelError(
        "architecture-unknown",
        f"the model class {transformer_class} is not supported",
        expected=known,
        hint="docs/how-it-works.md says how an architecture is added",
    )
