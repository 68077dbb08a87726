"""Families whose published tensors have the names and shapes of the trained ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..contracts import PipelineSpec
from ..operations import Expression, Read
from ..records import BaseModel, TensorSpec


@dataclass(frozen=True)
class IdentityArchitecture:
    """One transformer class and its pipelines; see `contracts.Architecture`."""

    name: str
    transformer_class: str
    pipelines: Mapping[str, PipelineSpec]
    module: str = "diffusers"

    def check_base(self, base: BaseModel) -> None:
        """Nothing to check beyond names, shapes and configs."""

    def make_expressions(
        self, base: BaseModel, sources: Mapping[str, TensorSpec]
    ) -> Mapping[str, Expression]:
        """Every tensor under its own name."""
        return {name: Read(name) for name in sources}
