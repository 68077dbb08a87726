"""Output layouts; one file each, one line in the table."""

from __future__ import annotations

from collections.abc import Mapping

from ..contracts import OutputLayout
from .pipeline import PipelineLayout
from .transformer import TransformerLayout

LAYOUTS: Mapping[str, OutputLayout] = {
    layout.name: layout for layout in (PipelineLayout(), TransformerLayout())
}
