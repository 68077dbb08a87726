"""MiniMax H3: the Diffusers transformer, and the native package it is published in.

Training uses the Diffusers class. The native package has other names, one fused tensor for query,
key and value, the halves of the gated projection swapped, and the rotary frequencies as a tensor.
Nothing is computed on trained values: every rule is a permutation of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..contracts import PipelineSpec
from ..errors import BaseModelError, PlanError, make_list
from ..operations import Apply, Cast, Expression, Read, list_inputs
from ..records import BaseModel, TensorSpec
from .identity import FLOW_MATCH, QWEN_TOKENIZER, IdentityArchitecture
from .minimax_h3_names import (
    CONFIG_FIELDS,
    DERIVED_FIELDS,
    GATED,
    INV_FREQ,
    ROPE_THETA,
    SAME_FIELDS,
    translate_name,
)

PARTITIONS = ("fl2va", "ref2va")
MODULAR_INDEX = "modular_model_index.json"


@dataclass(frozen=True, slots=True)
class QKVInterleave:
    """Fuse query, key and value [heads * head_dim, in] head by head: [heads * 3 * head_dim, in].

    The stacked order [all q; all k; all v] has the same shape and is wrong here.
    """

    num_heads: int
    head_dim: int
    is_invertible: ClassVar[bool] = True

    def make_spec(self, operands: Sequence[TensorSpec]) -> TensorSpec:
        """Three equal operands of `num_heads * head_dim` rows."""
        first = operands[0]
        rows = self.num_heads * self.head_dim
        if len(operands) != 3 or set(operands) != {first} or first.shape[:1] != (rows,):
            raise PlanError(
                "qkv-mismatch",
                "query, key and value cannot be fused",
                expected=f"three equal tensors of {rows} rows",
                found=", ".join(f"{list(o.shape)} {o.dtype}" for o in operands),
            )
        return TensorSpec((3 * rows, *first.shape[1:]), first.dtype)

    def apply(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Interleave."""
        rest = operands[0].shape[1:]
        parts = [o.reshape(self.num_heads, self.head_dim, *rest) for o in operands]
        return torch.stack(parts, dim=1).reshape(-1, *rest)

    def invert(self, result: torch.Tensor) -> list[torch.Tensor]:
        """Take query, key and value apart."""
        rest = result.shape[1:]
        parts = result.reshape(self.num_heads, 3, self.head_dim, *rest).unbind(1)
        return [part.reshape(-1, *rest) for part in parts]


@dataclass(frozen=True, slots=True)
class SwapHalves:
    """Swap the upper and the lower half of the rows; its own inverse."""

    is_invertible: ClassVar[bool] = True

    def make_spec(self, operands: Sequence[TensorSpec]) -> TensorSpec:
        """Same shape and dtype; the number of rows must be even."""
        (operand,) = operands
        if not operand.shape or operand.shape[0] % 2:
            raise PlanError(
                "halves-odd", "a gated projection has no halves", found=str(list(operand.shape))
            )
        return operand

    def apply(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Swap."""
        upper, lower = operands[0].chunk(2)
        return torch.cat([lower, upper])

    def invert(self, result: torch.Tensor) -> list[torch.Tensor]:
        """Swap back."""
        return [self.apply([result])]


@dataclass(frozen=True, slots=True)
class InverseFrequency:
    """The rotary frequencies, which no checkpoint holds; `values` are exact float32 numbers."""

    values: tuple[float, ...]
    # There is no source to recover: the file is compared with the computed tensor instead.
    is_invertible: ClassVar[bool] = False

    def make_spec(self, operands: Sequence[TensorSpec]) -> TensorSpec:
        """One float32 number per frequency."""
        return TensorSpec((len(self.values),), "float32")

    def apply(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make the tensor."""
        return torch.tensor(self.values, dtype=torch.float32)

    def invert(self, result: torch.Tensor) -> list[torch.Tensor]:
        """A constant has no sources."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class NativeMiniMaxH3(IdentityArchitecture):
    """The native package as base: trained in Diffusers names, published in native ones."""

    def make_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Translate the native config into the fields of the Diffusers class.

        Raises:
            BaseModelError: A field is unknown, or a derived one contradicts `hidden_size`.
        """
        known = {*CONFIG_FIELDS, *SAME_FIELDS, *DERIVED_FIELDS, "rope_theta"}
        unknown = {name for name in config if not name.startswith("_")} - known
        if unknown:
            raise BaseModelError(
                "config-field-unknown",
                f"the native config has unknown fields: {make_list(unknown)}",
                where="`transformer/config.json`",
            )
        for name, factor in DERIVED_FIELDS.items():
            hidden = config.get("hidden_size")
            if name in config and hidden is not None and config[name] != factor * hidden:
                raise BaseModelError(
                    "config-contradicts",
                    f"`{name}` does not fit `hidden_size`",
                    where="`transformer/config.json`",
                    expected=str(factor * hidden),
                    found=repr(config[name]),
                )
        result = {name: config[name] for name in SAME_FIELDS if name in config}
        result |= {ours: config[name] for name, ours in CONFIG_FIELDS.items() if name in config}
        return {"_class_name": self.trained_class, "rope_theta": ROPE_THETA, **result}

    def check_base(self, base: BaseModel) -> None:
        """Check the package's metadata and that its rotary frequencies are the formula's.

        Raises:
            BaseModelError: They are not, or the folder would be read as another kind of package.
        """
        check_package(base)
        values = base.extra["constants"][INV_FREQ]
        formula = make_inverse_frequencies(len(values), theta=ROPE_THETA).tolist()
        # Powers differ by a unit in the last place between processors; another theta by far more.
        if not all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(values, formula, strict=True)):
            raise BaseModelError(
                "rope-theta-differs",
                "the base's rotary frequencies are not those the trained class computes",
                where=f"tensor `{INV_FREQ}`",
                expected=f"theta {ROPE_THETA}",
            )

    def make_expressions(
        self, base: BaseModel, sources: Mapping[str, TensorSpec]
    ) -> Mapping[str, Expression]:
        """Make every native tensor, in the base's dtype, from the Diffusers tensors."""
        fuse = make_fusion({**(base.config_defaults or {}), **base.config})
        result: dict[str, Expression] = {}
        for name, spec in base.tensors.items():
            if name == INV_FREQ:
                values = tuple(base.extra["constants"][INV_FREQ])
                result[name] = Apply(InverseFrequency(values), ())
                continue
            expression = make_expression(name, fuse=fuse)
            found = {sources[fqn].dtype for fqn in list_inputs(expression) if fqn in sources}
            # The native loaders fix every dtype: those that training rounded are widened again.
            if found and found != {spec.dtype}:
                expression = Apply(Cast(spec.dtype), (expression,))
            result[name] = expression
        return result


def make_fusion(config: Mapping[str, Any]) -> QKVInterleave:
    """Make the fusing operation from a Diffusers config."""
    try:
        return QKVInterleave(config["num_attention_heads"], config["attention_head_dim"])
    except KeyError as error:
        raise BaseModelError(
            "config-field-missing",
            f"the base's config does not say {error}",
            where="`transformer/config.json`",
        ) from error


def make_expression(name: str, *, fuse: QKVInterleave) -> Expression:
    """Make one native tensor; one with an unknown name is read, and so reported as missing."""
    parts = translate_name(name)
    if parts is None:
        return Read(name)
    if len(parts) == 3:
        return Apply(fuse, tuple(Read(part) for part in parts))
    return Apply(SwapHalves(), (Read(parts[0]),)) if name.endswith(GATED) else Read(parts[0])


def make_inverse_frequencies(length: int, *, theta: float) -> torch.Tensor:
    """Rotary frequencies [length] in float32; the reciprocal form, as both sides compute them."""
    steps = torch.arange(0, 2 * length, 2, dtype=torch.float32)
    return 1.0 / (theta ** (steps / (2 * length)))


def check_package(base: BaseModel) -> None:
    """Check the `_minimax_h3` metadata of a native package.

    Raises:
        BaseModelError: A field that its readers check is wrong.
    """
    index = base.extra.get("model_index") or {}
    about = index.get("_minimax_h3")
    about = about if isinstance(about, dict) else {}
    tasks = about.get("tasks")
    problems = [
        what
        for what, fits in (
            ("schema_version", about.get("schema_version") == 1),
            ("partition", about.get("partition") in PARTITIONS),
            ("tasks", isinstance(tasks, list) and len(tasks) > 0),
        )
        if not fits
    ]
    if problems:
        raise BaseModelError(
            "pipeline-invalid",
            f"`_minimax_h3` has a wrong or missing {make_list(problems)}",
            where="`model_index.json`",
            expected="schema_version 1, partition fl2va or ref2va, a list of tasks",
            found=repr(about)[:200],
        )
    if MODULAR_INDEX in {file.path for file in base.files}:
        raise BaseModelError(
            "pipeline-invalid",
            f"a native package must not hold `{MODULAR_INDEX}`: it would be read as a modular one",
            hint="pass the folder of one native package (FL2VA or Ref2VA)",
        )


MINIMAX_H3 = IdentityArchitecture(
    name="minimax_h3",
    transformer_class="MiniMaxH3Transformer3DModel",
    module="diffusers.models.transformers.transformer_minimax_h3",
    pipelines={
        "MiniMaxH3ModularPipeline": PipelineSpec({"transformer": ("MiniMaxH3Transformer3DModel",)})
    },
    keep_in_fp32=(
        "proj_in",
        "audio_proj_in",
        "time_embedder",
        "proj_out",
        "audio_proj_out",
        "rope",
    ),
    output_formats=("transformer",),
)

MINIMAX_H3_NATIVE = NativeMiniMaxH3(
    name="minimax_h3_native",
    transformer_class="MiniMaxH3DiTModel",
    model_class="MiniMaxH3Transformer3DModel",
    module="diffusers.models.transformers.transformer_minimax_h3",
    pipelines={
        "MiniMaxH3Pipeline": PipelineSpec(
            {
                "transformer": ("MiniMaxH3DiTModel",),
                "text_encoder": ("MiniMaxH3Qwen3VLHFEncoder",),
                "tokenizer": QWEN_TOKENIZER,
                "processor": ("Qwen3VLProcessor",),
                "video_vae": ("MiniMaxH3VideoVAE",),
                "audio_vae": ("MiniMaxH3AudioVAE",),
                "scheduler": FLOW_MATCH,
            },
            optional=frozenset({"scheduler"}),
            options={"_minimax_h3": (dict,)},
        )
    },
    keep_in_fp32=(
        *("video_patch_proj", "audio_patch_proj", "time_embedder", "video_out", "audio_out"),
        "rope",
    ),
    weights_stems=("model", "diffusion_pytorch_model"),
    output_formats=("pipeline",),
    artifact_type="minimax_h3_pipeline",
    constants=(INV_FREQ,),
    has_fixed_dtypes=True,
)
