"""Pure tensor operations with a shape rule and a dtype rule, and the expressions made of them.

The plan holds expressions as data. `evaluate` computes one; `invert` recovers the source tensors
from the result where every operation on the way can be undone without loss, which lets the
verification compare the published file with the source slices directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from .errors import PlanError, VerificationError
from .records import FLOATING_DTYPES, TensorSpec


class Operation(Protocol):
    """One pure function of tensors; `is_invertible` tells whether `invert` can undo it."""

    @property
    def is_invertible(self) -> bool:
        """Whether the operands can be recovered from the result bit for bit."""

    def make_spec(self, operands: Sequence[TensorSpec]) -> TensorSpec:
        """Shape and dtype of the result; raises PlanError when the operands do not fit."""

    def apply(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the result; operands are not changed."""

    def invert(self, result: torch.Tensor) -> list[torch.Tensor]:
        """Recover the operands bit for bit; only called where `is_invertible`."""


@dataclass(frozen=True, slots=True)
class Read:
    """Leaf of an expression: the full source tensor `fqn`."""

    fqn: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Node of an expression: `operation` on the results of `operands`."""

    operation: Operation
    operands: tuple[Expression, ...]


Expression = Read | Apply


@dataclass(frozen=True, slots=True)
class Cast:
    """Round every element to a floating `dtype`; a finite value that overflows is an error."""

    dtype: str
    is_invertible: ClassVar[bool] = False

    def make_spec(self, operands: Sequence[TensorSpec]) -> TensorSpec:
        """Same shape, new dtype."""
        (operand,) = operands
        if operand.dtype not in FLOATING_DTYPES or self.dtype not in FLOATING_DTYPES:
            raise PlanError("cast-not-floating", f"no cast from {operand.dtype} to {self.dtype}")
        return TensorSpec(operand.shape, self.dtype)

    def apply(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Cast, then check that nothing became infinite."""
        result = operands[0].to(getattr(torch, self.dtype))
        if not is_finite(result):
            raise VerificationError(
                "cast-overflow",
                f"a finite value does not fit into {self.dtype}",
                hint="choose --dtype preserve, bfloat16 or float32",
            )
        return result

    def invert(self, result: torch.Tensor) -> list[torch.Tensor]:
        """A rounding cannot be undone."""
        raise NotImplementedError


def is_finite(tensor: torch.Tensor, *, chunk_numel: int = 2**22) -> bool:
    """Tell whether a tensor of any dtype holds no NaN and no infinity.

    Memory: one chunk; `aminmax` propagates NaN, and needs no mask of the tensor's size.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    wide = tensor.element_size() == 1
    for piece in iter_contiguous(tensor, chunk_numel=chunk_numel):
        low, high = torch.aminmax(piece.float() if wide else piece)
        if not bool(torch.isfinite(low)) or not bool(torch.isfinite(high)):
            return False
    return True


def iter_contiguous(tensor: torch.Tensor, *, chunk_numel: int = 2**22) -> Iterator[torch.Tensor]:
    """Yield 1-D contiguous pieces of `tensor` in row-major order, at most about `chunk_numel`.

    A contiguous tensor is yielded as views; anything else is copied piece by piece.
    """
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), chunk_numel):
            yield flat[start : start + chunk_numel]
        return
    row_numel = max(1, tensor[0].numel())
    if row_numel > chunk_numel:
        for row in tensor:
            yield from iter_contiguous(row, chunk_numel=chunk_numel)
        return
    step = max(1, chunk_numel // row_numel)
    for start in range(0, tensor.shape[0], step):
        yield tensor[start : start + step].contiguous().view(-1)


def make_spec(expression: Expression, sources: Mapping[str, TensorSpec]) -> TensorSpec:
    """Shape and dtype of an expression's result."""
    if isinstance(expression, Read):
        return sources[expression.fqn]
    return expression.operation.make_spec([make_spec(o, sources) for o in expression.operands])


def substitute(expression: Expression, values: Mapping[str, Expression]) -> Expression:
    """Replace every leaf by the expression `values` has for its name."""
    if isinstance(expression, Read):
        return values[expression.fqn]
    return Apply(expression.operation, tuple(substitute(o, values) for o in expression.operands))


def list_inputs(expression: Expression) -> tuple[str, ...]:
    """FQNs an expression reads, in order of evaluation."""
    if isinstance(expression, Read):
        return (expression.fqn,)
    return tuple(fqn for operand in expression.operands for fqn in list_inputs(operand))


def evaluate(expression: Expression, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute an expression from the full source tensors."""
    if isinstance(expression, Read):
        return tensors[expression.fqn]
    return expression.operation.apply([evaluate(o, tensors) for o in expression.operands])


def is_invertible(expression: Expression) -> bool:
    """Tell whether every source tensor can be recovered from the result bit for bit."""
    if isinstance(expression, Read):
        return True
    return expression.operation.is_invertible and all(
        is_invertible(operand) for operand in expression.operands
    )


def invert(expression: Expression, result: torch.Tensor) -> dict[str, torch.Tensor]:
    """Recover every source tensor from the result; the expression must be invertible."""
    if isinstance(expression, Read):
        return {expression.fqn: result}
    recovered: dict[str, torch.Tensor] = {}
    parts = expression.operation.invert(result)
    for operand, part in zip(expression.operands, parts, strict=True):
        recovered.update(invert(operand, part))
    return recovered
