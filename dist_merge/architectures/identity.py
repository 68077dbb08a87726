"""The common case: the checkpoint's names are the base's names, nothing is rearranged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..contracts import PipelineSpec
from ..operations import Expression, Read
from ..records import BaseModel, TensorSpec

FLOW_MATCH = ("*Scheduler",)
QWEN_TOKENIZER = ("Qwen2Tokenizer", "AutoTokenizer")
CLIP_TOKENIZER = ("CLIPTokenizer",)
T5_TOKENIZER = ("T5Tokenizer", "AutoTokenizer")


def accept_base(base: BaseModel) -> None:
    """Accept any configuration: the model class and the headers are checked elsewhere."""


@dataclass(frozen=True, kw_only=True)
class IdentityArchitecture:
    """A family whose checkpoint and output have the same tensors under the same names.

    `model_class` is the class that is trained, where that is not `transformer_class`.
    """

    name: str
    transformer_class: str
    module: str
    pipelines: Mapping[str, PipelineSpec]
    keep_in_fp32: tuple[str, ...] = ()
    weights_stems: tuple[str, ...] = ("diffusion_pytorch_model",)
    output_formats: tuple[str, ...] = ("pipeline", "transformer")
    check: Callable[[BaseModel], None] = accept_base
    model_class: str | None = None
    artifact_type: str = "diffusers_pipeline"
    constants: tuple[str, ...] = ()
    has_fixed_dtypes: bool = False

    @property
    def trained_class(self) -> str:
        """Class of the live module."""
        return self.model_class or self.transformer_class

    def make_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Translate the base's config into that of the trained class."""
        return config

    def check_base(self, base: BaseModel) -> None:
        """Raise BaseModelError where configuration values of the base contradict each other."""
        self.check(base)

    def make_expressions(
        self, base: BaseModel, sources: Mapping[str, TensorSpec]
    ) -> Mapping[str, Expression]:
        """Map every tensor of the base to itself.

        The plan compares both sides and names what is missing or unexpected.
        """
        return {name: Read(name) for name in base.tensors}
