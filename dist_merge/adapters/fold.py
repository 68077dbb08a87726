"""Fold an adapter into the weight it belongs to: W + scaling * (B @ A), and its variants.

Everything is computed in fp32 and rounded once to W's dtype. Rows are taken in blocks of a size
that depends on the tensor alone, so that the bits are the same for any number of ranks, in bounded
memory. The scaling multiplies the product, as PEFT does; multiplying a factor gives other bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import PlanError
from ..operations import Apply, Expression, Read
from ..records import FLOATING_DTYPES, TensorSpec

# Elements of one block in fp32: 64 MiB.
BLOCK_NUMEL = 2**24


@dataclass(frozen=True, slots=True)
class Fold:
    """What all folds share: operands are W, A, B and with DoRA the magnitudes."""

    scaling: float
    is_invertible: ClassVar[bool] = False

    def make_spec(self, operands: Sequence[TensorSpec]) -> TensorSpec:
        """Shape and dtype of W; the factors must fit it."""
        weight, factor_a, factor_b = operands[:3]
        if any(spec.dtype not in FLOATING_DTYPES for spec in operands):
            raise PlanError("cast-not-floating", "an adapter or its weight is not floating point")
        self.check_shapes(weight.shape, factor_a.shape, factor_b.shape)
        if len(operands) > 3 and math.prod(operands[3].shape) != factor_b.shape[0]:
            raise make_shape_error(weight.shape, factor_a.shape, factor_b.shape)
        return weight

    def check_shapes(
        self, weight: tuple[int, ...], factor_a: tuple[int, ...], factor_b: tuple[int, ...]
    ) -> None:
        """Raise PlanError where the factors do not make a delta of W's shape."""
        raise NotImplementedError

    def delta(self, a: torch.Tensor, b: torch.Tensor, rows: slice) -> torch.Tensor:
        """Rows of scaling * (B @ A), [rows, ...], fp32."""
        raise NotImplementedError

    def apply(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the folded weight."""
        weight = operands[0]
        a, b = operands[1].float(), operands[2].float()
        magnitude = operands[3].float().flatten() if len(operands) > 3 else None
        result = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for rows in iter_blocks(weight):
            block = weight[rows].float() + self.delta(a, b, rows)
            if magnitude is not None:
                norm = torch.linalg.norm(block.flatten(1), dim=1)
                factor = (magnitude[rows] / norm).view(-1, *[1] * (block.dim() - 1))
                block = factor * block
            result[rows] = block.to(weight.dtype)
        return result

    def invert(self, result: torch.Tensor) -> list[torch.Tensor]:
        """A sum cannot be taken apart."""
        raise NotImplementedError


class FoldLinear(Fold):
    """W [out, in], A [r, in], B [out, r]."""

    __slots__ = ()

    def check_shapes(
        self, weight: tuple[int, ...], factor_a: tuple[int, ...], factor_b: tuple[int, ...]
    ) -> None:
        """See `Fold`."""
        fits = len(weight) == len(factor_a) == len(factor_b) == 2
        if not fits or (factor_b[0], factor_a[1]) != weight or factor_a[0] != factor_b[1]:
            raise make_shape_error(weight, factor_a, factor_b)

    def delta(self, a: torch.Tensor, b: torch.Tensor, rows: slice) -> torch.Tensor:
        """See `Fold`."""
        return (b[rows] @ a) * self.scaling


class FoldTransposed(Fold):
    """W [in, out] of a layer with `fan_in_fan_out`, or [num, dim] of an embedding.

    The factors are as for a linear layer: A [r, in], B [out, r].
    """

    __slots__ = ()

    def check_shapes(
        self, weight: tuple[int, ...], factor_a: tuple[int, ...], factor_b: tuple[int, ...]
    ) -> None:
        """See `Fold`."""
        fits = len(weight) == len(factor_a) == len(factor_b) == 2
        if not fits or (factor_a[1], factor_b[0]) != weight or factor_a[0] != factor_b[1]:
            raise make_shape_error(weight, factor_a, factor_b)

    def delta(self, a: torch.Tensor, b: torch.Tensor, rows: slice) -> torch.Tensor:
        """See `Fold`."""
        return (b @ a[:, rows]).T * self.scaling


class FoldConv(Fold):
    """W [out, in, *kernel], A [r, in, *kernel], B [out, r, 1, ...]; no groups."""

    __slots__ = ()

    def check_shapes(
        self, weight: tuple[int, ...], factor_a: tuple[int, ...], factor_b: tuple[int, ...]
    ) -> None:
        """See `Fold`."""
        dims = len(weight)
        if not (3 <= dims <= 5 and len(factor_a) == len(factor_b) == dims):
            raise make_shape_error(weight, factor_a, factor_b)
        if factor_a[0] != factor_b[1] or factor_a[1] != weight[1]:
            raise PlanError(
                "adapter-unsupported",
                "an adapter on a convolution with groups cannot be folded",
                expected=f"factors for {weight[1]} input channels",
                found=f"A {list(factor_a)}, B {list(factor_b)}",
            )
        fits = factor_b[0] == weight[0] and factor_a[2:] == weight[2:]
        if not fits or any(size != 1 for size in factor_b[2:]):
            raise make_shape_error(weight, factor_a, factor_b)

    def delta(self, a: torch.Tensor, b: torch.Tensor, rows: slice) -> torch.Tensor:
        """See `Fold`; a convolution's own kernels give other bits for other numbers of threads."""
        return (b[rows].flatten(1) @ a.flatten(1)).view(-1, *a.shape[1:]) * self.scaling


@dataclass(frozen=True, slots=True)
class AddScaled:
    """bias + scaling * (bias of B), [out]; fp32, rounded once."""

    scaling: float
    is_invertible: ClassVar[bool] = False

    def make_spec(self, operands: Sequence[TensorSpec]) -> TensorSpec:
        """Shape and dtype of the layer's own bias."""
        own, other = operands
        if own.shape != other.shape:
            raise PlanError(
                "adapter-shape",
                "an adapter's bias does not fit its layer",
                expected=str(list(own.shape)),
                found=str(list(other.shape)),
            )
        return own

    def apply(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the sum."""
        own, other = operands
        return (own.float() + other.float() * self.scaling).to(own.dtype)

    def invert(self, result: torch.Tensor) -> list[torch.Tensor]:
        """A sum cannot be taken apart."""
        raise NotImplementedError


def iter_blocks(weight: torch.Tensor) -> Iterator[slice]:
    """Cut rows into blocks of about BLOCK_NUMEL elements; never one row unless W has one."""
    rows = weight.shape[0]
    step = max(2, BLOCK_NUMEL // max(1, weight.numel() // max(1, rows)))
    starts = list(range(0, rows, step))
    if len(starts) > 1 and rows - starts[-1] == 1:
        # A product with a single row takes another kernel, whose sums run in another order.
        starts.pop()
    for number, start in enumerate(starts):
        yield slice(start, starts[number + 1] if number + 1 < len(starts) else rows)


def unfold(expression: Expression) -> Expression:
    """Return the expression without folds: what the output would be with the adapter left out."""
    if isinstance(expression, Read):
        return expression
    if isinstance(expression.operation, Fold | AddScaled):
        return unfold(expression.operands[0])
    return Apply(expression.operation, tuple(unfold(o) for o in expression.operands))


def make_shape_error(
    weight: tuple[int, ...], factor_a: tuple[int, ...], factor_b: tuple[int, ...]
) -> PlanError:
    """Make the error for factors that do not fit; names a rank's slice where it looks like one."""
    hint = "is this the base the run started from, and was the whole adapter saved?"
    for what, have, full in (
        ("B", factor_b[0] if factor_b else 0, weight[0] if weight else 0),
        ("A", factor_a[1] if len(factor_a) > 1 else 0, weight[1] if len(weight) > 1 else 0),
    ):
        if 0 < have < full:
            hint = (
                f"{what} has {have} of {full} rows or columns, as one rank of a run at world size "
                f"{math.ceil(full / have)} holds: the adapter was saved from one rank's slice"
            )
    return PlanError(
        "adapter-shape",
        "an adapter's factors do not fit the weight they belong to",
        expected=f"factors of a weight {list(weight)}",
        found=f"A {list(factor_a)}, B {list(factor_b)}",
        hint=hint,
    )
