"""What one value of a rank file holds, as boxes: DTensor, ShardedTensor or plain tensor.

Each value is judged by itself, never by its neighbours, its name or its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SourceError
from ..records import DTYPES, LocalShard
from .geometry import Layout, Placement, locate_boxes
from .mesh import MeshView, read_mesh
from .sharded_tensor import ShardedTensorView, read_shards
from .unpickle import flat_parameter_error

FLAT_NAMES = frozenset({"_flat_param", "flat_param"})
# Names of mesh axes that cut a model's layers, as frameworks call them.
TENSOR_PARALLEL = frozenset({"tp", "tensor", "mp"})


@dataclass(frozen=True)
class Piece:
    """One box of a tensor and its data, a view into the mapped file."""

    fqn: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    source_file: str
    source_key: str
    is_whole_copy: bool = False

    def make_shard(self, holder: int) -> LocalShard:
        """Describe the piece for the plan."""
        return LocalShard(
            self.fqn,
            self.global_shape,
            str(self.tensor.dtype).removeprefix("torch."),
            self.offsets,
            tuple(self.tensor.shape),
            holder,
            self.source_file,
            self.source_key,
            self.is_whole_copy,
        )


@dataclass(frozen=True)
class PieceDescriber:
    """Describes the values of one rank file, `path`, of training rank `rank`."""

    path: str
    rank: int | None
    is_old: bool = False
    assumed_order: str | None = None

    def describe(self, fqn: str, key: str, value: Any) -> Iterator[Piece]:
        """Yield the pieces of one value.

        Raises:
            SourceError: No tensor, an unsupported layout, or a piece that does not fit its claim.
        """
        from torch.distributed.tensor import DTensor

        if not FLAT_NAMES.isdisjoint(key.split(".")):
            raise flat_parameter_error(key, file=self.path)
        if not isinstance(value, torch.Tensor):
            raise SourceError(
                "not-a-state-dict",
                f"`{key}` is no tensor",
                where=f"`{self.path}`",
                found=type(value).__name__,
            )
        try:
            if isinstance(value, ShardedTensorView):
                yield from self._describe_sharded(fqn, key, value)
            elif isinstance(value, DTensor):
                yield from self._describe_dtensor(fqn, key, value)
            else:
                shape = tuple(value.shape)
                piece = take_data(value, value.dtype)
                yield Piece(fqn, shape, (0,) * len(shape), piece, self.path, key, True)
        except SourceError as error:
            if error.where is None:
                error.where = f"tensor `{fqn}`, `{self.path}`"
            raise

    def _describe_dtensor(self, fqn: str, key: str, value: Any) -> Iterator[Piece]:
        """Yield the boxes of a DTensor's local piece; nothing here talks to a process group."""
        try:
            spec, local_tensor = value._spec, value._local_tensor
            mesh = read_mesh(spec.mesh)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise SourceError(
                "mesh-invalid",
                "the mesh of a tensor cannot be read",
                found=f"{type(error).__name__}: {error}",
                hint="it is damaged, or of a torch release this version does not know",
            ) from error
        self._check_rank(mesh.rank)
        if mesh.coordinate is None:
            return
        placements = tuple(read_placement(placement) for placement in spec.placements)
        check_ascending(mesh, placements)
        stated = getattr(spec, "shard_order", None) or ()
        layout = Layout(
            mesh.shape,
            mesh.coordinate,
            placements,
            shard_order={entry.tensor_dim: tuple(entry.mesh_dims) for entry in stated},
            is_interleaved=getattr(spec, "use_strided_shard_as_shard_order", None) is False,
            # FSDP over tensor parallelism splits right to left, which that torch wrote like a split
            # from left to right.
            is_order_unknown=self.is_old and any(is_tensor_parallel(name) for name in mesh.names),
            assumed_order=self.assumed_order,
        )
        shape, local = tuple(value.shape), take_data(local_tensor, value.dtype)
        boxes = locate_boxes(shape, local_shape=local.shape, layout=layout)
        for number, box in enumerate(boxes):
            view = local
            for dim, (start, size) in enumerate(zip(box.local_offsets, box.sizes, strict=True)):
                view = view.narrow(dim, start, size)
            yield Piece(
                fqn, shape, box.offsets, view, self.path, name_part(key, number, len(boxes))
            )

    def _describe_sharded(self, fqn: str, key: str, value: ShardedTensorView) -> Iterator[Piece]:
        """Yield the local shards of a ShardedTensor; a rank that owns nothing has none."""
        shards, rank = read_shards(value)
        self._check_rank(rank)
        shape = tuple(value.shape)
        if not shards and 0 in shape:
            # Nothing to own, so no rank lists it; the tensor is still one of the model's.
            yield Piece(
                fqn, shape, (0,) * len(shape), torch.empty(shape, dtype=value.dtype), self.path, key
            )
        for number, shard in enumerate(shards):
            if tuple(shard.tensor.shape) != shard.sizes or len(shard.offsets) != len(shape):
                raise SourceError(
                    "local-shard-size",
                    "a local shard is not as large as its metadata says",
                    expected=str(list(shard.sizes)),
                    found=str(list(shard.tensor.shape)),
                    hint="the file is damaged or was edited",
                )
            data = take_data(shard.tensor, value.dtype)
            yield Piece(
                fqn, shape, shard.offsets, data, self.path, name_part(key, number, len(shards))
            )

    def _check_rank(self, rank: int | None) -> None:
        """Compare the rank that saved a tensor with the one in the file's name."""
        if rank is not None and self.rank is not None and rank != self.rank:
            raise SourceError(
                "rank-mismatch",
                "a rank file was renamed: its content was saved by another rank",
                where=f"`{self.path}`",
                expected=f"rank {self.rank}",
                found=f"rank {rank}",
                hint="give the files back their names",
            )


def check_ascending(mesh: MeshView, placements: tuple[Placement, ...]) -> None:
    """Refuse pieces along an axis whose ranks do not ascend.

    There torch places a piece by its coordinate or by its number in the process group, which counts
    ranks upwards, depending on what made the tensor; and the file does not tell.
    """
    for axis, (line, placement) in enumerate(zip(mesh.lines, placements, strict=False)):
        if placement.dim is not None and not mesh.is_ascending(axis):
            raise SourceError(
                "mesh-order",
                "a tensor is sharded along a mesh axis whose ranks do not ascend",
                expected="ascending ranks, as `init_device_mesh` gives",
                found=f"ranks {list(line)}",
                hint="train or save on a mesh with ascending ranks",
            )


def is_tensor_parallel(name: str) -> bool:
    """Whether a mesh axis is called after tensor parallelism."""
    return not TENSOR_PARALLEL.isdisjoint(name.lower().replace("-", "_").split("_"))


def name_part(key: str, number: int, total: int) -> str:
    """Key of one part of a piece; `read` finds it again by this alone."""
    return key if total == 1 else f"{key}#{number}"


def take_data(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of a plain or local tensor, detached from autograd.

    Raises:
        SourceError: safetensors cannot hold it, or the whole claims another `dtype`.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout is not torch.strided:
        raise SourceError(
            "dtype-unknown",
            "a tensor cannot be stored in safetensors",
            found=f"{name}, {tensor.layout}",
        )
    if tensor.dtype != dtype:
        raise SourceError(
            "dtype-disagrees",
            "a local shard has another dtype than its tensor",
            expected=str(dtype).removeprefix("torch."),
            found=name,
            hint="the file is damaged or was edited",
        )
    data: torch.Tensor = tensor.detach().resolve_conj().resolve_neg()
    return data


def read_placement(placement: Any) -> Placement:
    """Turn a torch placement into ours.

    Raises:
        SourceError: Partial sums, or a class this version does not know.
    """
    name = type(placement).__name__
    if name == "Shard":
        return Placement(dim=int(placement.dim))
    if name == "_StridedShard":
        return Placement(dim=int(placement.dim), split_factor=int(placement.split_factor))
    if name == "Replicate":
        return Placement()
    if name in ("Partial", "_Partial", "MaskPartial", "_MaskPartial"):
        raise SourceError(
            "placement-partial",
            "a tensor is saved as partial sums, which are no weights",
            found=repr(placement),
            hint="reduce the tensor before saving, then merge again",
        )
    raise SourceError("placement-unknown", f"unknown placement {name}", found=repr(placement))
