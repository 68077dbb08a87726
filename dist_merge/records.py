"""Frozen data that the steps hand to each other. No I/O, no communication, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

# Bits per element, by torch dtype name without the prefix, with the safetensors name.
DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
SAFETENSORS_DTYPES: dict[str, str] = {name: dtype for dtype, (name, _) in DTYPES.items()}
FLOATING_DTYPES = frozenset(
    {"float64", "float32", "float16", "bfloat16", *(name for name in DTYPES if "float8" in name)}
)


def item_nbytes(dtype: str) -> int:
    """Bytes of one element of `dtype` (torch name without the prefix)."""
    return DTYPES[dtype][1]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype (torch name without the prefix) of one full tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * item_nbytes(self.dtype)


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The piece of one tensor that one source file holds: a box of offsets + sizes.

    `source_key` finds it again in its file (the key as written there); `holder` is the
    process-group rank that reads the file. `is_whole_copy` marks plain tensors: every rank of the
    training run is expected to hold an equal copy, a missing copy is no hole.
    """

    fqn: str
    global_shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    holder: int
    source_file: str
    source_key: str
    is_whole_copy: bool = False


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file: logical path, size, and what identifies it unchanged (mtime, inode)."""

    path: str
    nbytes: int
    mtime_ns: int = 0
    inode: int = 0


@dataclass(frozen=True)
class SourceInventory:
    """What all ranks together hold; equal on every rank after the exchange."""

    backend: str
    files: tuple[SourceFile, ...]
    holders: Mapping[str, int]
    shards: tuple[LocalShard, ...]
    world_size: int
    actor_config: Mapping[str, Any] | None
    actor_config_sha256: str | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BaseModel:
    """Description of the base: what rank 0 read from its headers, configs and model class.

    `tensors` is the trained component's schema in the base's own names; `tensor_files` says in
    which file (relative to the base) each lies. `files` are all files that will be copied,
    `replaced` the old weight files and index of the trained component, `left_out` weight files
    that belong to no component. `config` is in the fields of `trained_class`, which is another
    class than the base's own (`transformer_class`) only where the base is in a native form.
    """

    is_pipeline: bool
    pipeline_class: str | None
    transformer_class: str
    component: str
    component_dir: str
    config: Mapping[str, Any]
    config_defaults: Mapping[str, Any] | None
    tensors: Mapping[str, TensorSpec]
    tensor_files: Mapping[str, str]
    keep_in_fp32: tuple[str, ...]
    files: tuple[SourceFile, ...]
    replaced: tuple[SourceFile, ...]
    left_out: tuple[str, ...]
    edited_configs: Mapping[str, tuple[str, ...]]
    model_class_check: str
    trained_class: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_native(self) -> bool:
        """Whether the base's tensors have other names than those of the live module."""
        return bool(self.trained_class) and self.trained_class != self.transformer_class


@dataclass(frozen=True, slots=True)
class PlannedBox:
    """One box of one source tensor: who sends it, and who else holds an equal copy of it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sender: int
    source_file: str
    source_key: str
    replicas: tuple[tuple[int, str, str], ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One full source tensor and the boxes that tile it exactly."""

    fqn: str
    spec: TensorSpec
    boxes: tuple[PlannedBox, ...]


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the output: the expression (see `operations`) that makes it."""

    name: str
    spec: TensorSpec
    expression: Any
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class OutputShard:
    """One safetensors file of the result; tensors in the order they are written.

    `is_adapter` tells a file of the adapter folder from one of the model's weights.
    """

    path: str
    metadata: Mapping[str, str]
    tensors: tuple[OutputTensor, ...]
    is_adapter: bool = False

    @property
    def nbytes(self) -> int:
        """Payload bytes, header excluded."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Bucket:
    """Consecutive output tensors of one output shard that are gathered together."""

    output_shard: int
    index: int
    tensors: tuple[OutputTensor, ...]
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """One tensor of an adapter folder: its key without any library's prefix, and its source."""

    key: str
    fqn: str


@dataclass(frozen=True)
class AdapterPlan:
    """One LoRA adapter of the checkpoint, and what becomes of it.

    Ranks, alphas and scalings are by module. `folded` are the plain names of the tensors that an
    adapter is folded into; `exports` the tensors of the adapter folder; `factors` the FQNs of
    all factors. `base_weights` says whose weights it acts on: `checkpoint` or `base_model`.
    """

    name: str
    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    bias: str
    fan_in_fan_out: bool
    source: str
    assumed: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    scalings: Mapping[str, float]
    saved_modules: tuple[str, ...]
    excluded_adapters: tuple[str, ...]
    is_fused: bool
    base_weights: str
    folded: tuple[str, ...]
    exports: tuple[ExportedTensor, ...]
    factors: tuple[str, ...]
    changes_base: bool


@dataclass(frozen=True)
class MergePlan:
    """The whole job as data; every rank makes it and the ranks compare its digest.

    `world_size` is that of the training run.
    """

    artifact_type: str
    architecture: str
    tensor_directory: str
    sources: Mapping[str, SourceTensor]
    output_shards: tuple[OutputShard, ...]
    index_path: str | None
    buckets: tuple[Bucket, ...]
    dtype_changes: Mapping[str, tuple[str, str]]
    notes: tuple[str, ...] = ()
    adapter: AdapterPlan | None = None
    world_size: int = 1

    @property
    def weight_shards(self) -> tuple[OutputShard, ...]:
        """The files of the model's weights."""
        return tuple(shard for shard in self.output_shards if not shard.is_adapter)

    @property
    def adapter_shards(self) -> tuple[OutputShard, ...]:
        """The files of the adapter folder."""
        return tuple(shard for shard in self.output_shards if shard.is_adapter)


@dataclass(frozen=True)
class MergeResult:
    """What a finished merge returns, the same on every rank."""

    output_dir: str
    manifest_path: str
    artifact_type: str
    architecture: str
    num_tensors: int
    num_files: int
    nbytes: int
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()
    uploaded_to: str | None = None
