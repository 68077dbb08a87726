"""The four things of which more may be added: architectures, sources, layouts, transports.

Each is one file in the folder of that name and one line in the table of its `__init__`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from .operations import Expression
from .records import BaseModel, LocalShard, SourceFile, TensorSpec


@dataclass(frozen=True)
class PipelineSpec:
    """Components one pipeline class declares: name -> accepted class names.

    `optional` components may be absent or `[null, null]`. `options` are plain values of
    `model_index.json`: name -> accepted Python types. Class names may hold `*`. `libraries` are
    library names accepted in the index beside `diffusers` and `transformers`.
    """

    components: Mapping[str, tuple[str, ...]]
    optional: frozenset[str] = frozenset()
    options: Mapping[str, tuple[type, ...]] = field(default_factory=dict)
    libraries: frozenset[str] = frozenset()


class Architecture(Protocol):
    """One family: a transformer class, its pipelines, and how its output tensors are made.

    `module` is where the class is imported from; empty where there is no such class, then
    `keep_in_fp32` counts. `weights_stems` are the names its weight files may have.
    """

    @property
    def name(self) -> str:
        """Short name of the family."""

    @property
    def transformer_class(self) -> str:
        """`_class_name` in the component's config."""

    @property
    def module(self) -> str:
        """Module of the class."""

    @property
    def pipelines(self) -> Mapping[str, PipelineSpec]:
        """Pipeline class -> its components."""

    @property
    def keep_in_fp32(self) -> tuple[str, ...]:
        """Name components that stay fp32, used where the class cannot be imported."""

    @property
    def weights_stems(self) -> tuple[str, ...]:
        """File stems of the component's weights."""

    @property
    def output_formats(self) -> tuple[str, ...]:
        """Output formats that make sense for this family."""

    @property
    def trained_class(self) -> str:
        """Class of the live module; another than `transformer_class` where the base is native."""

    @property
    def artifact_type(self) -> str:
        """The manifest's `artifact_type` of a whole pipeline."""

    @property
    def constants(self) -> tuple[str, ...]:
        """Small float32 tensors of the base whose values are needed (`extra["constants"]`)."""

    @property
    def has_fixed_dtypes(self) -> bool:
        """Whether the output always has the base's dtypes."""

    def make_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Translate the base's config into that of the trained class."""

    def check_base(self, base: BaseModel) -> None:
        """Raise BaseModelError where configuration values of the base contradict each other."""

    def make_expressions(
        self, base: BaseModel, sources: Mapping[str, TensorSpec]
    ) -> Mapping[str, Expression]:
        """Map every output tensor name to the expression that makes it from source tensors.

        `sources` are the checkpoint's full tensors by cleaned FQN. Names only: the plan checks
        that each source is used exactly once and each expected tensor is made exactly once.
        """


class SourceReader(Protocol):
    """The files of one checkpoint that this rank has opened."""

    def describe(self, holder: int) -> list[LocalShard]:
        """Describe every tensor piece in the opened files; reads headers and metadata only."""

    def read(self, source_file: str, source_key: str) -> torch.Tensor:
        """Return the local piece, shape = `LocalShard.sizes`, where it lies (mapped, no copy)."""

    def notes(self) -> list[str]:
        """Return remarks for the log: wrappers removed, files ignored, keys left aside."""

    def close(self) -> None:
        """Drop all tensors and unmap the files."""


class Source(Protocol):
    """One kind of sharded checkpoint."""

    backend: str

    def find_files(self, local_dir: Path) -> list[SourceFile]:
        """List the checkpoint files this machine sees, sorted by path; no content is read."""

    def check_complete(self, names: Sequence[str]) -> int:
        """Return the training world size; raise SourceError when the union is not complete."""

    def open(self, local_dir: Path, files: Sequence[SourceFile]) -> SourceReader:
        """Open the files dealt to this rank."""


@runtime_checkable
class IndexedSource(Source, Protocol):
    """A source whose files only together say what they hold.

    Every rank reads the index of its own files; the ranks exchange these, and each gets a source
    that knows them all. Only then are files checked, opened and described.
    """

    is_pickle: bool

    def read_index(self, local_dir: Path, files: Sequence[SourceFile]) -> bytes:
        """Return what the files dealt to this rank say of themselves; data only, may be empty."""

    def with_index(self, payloads: Sequence[bytes], *, state_key: str | None) -> Source:
        """Return the source of the state dict `state_key`, given every rank's `read_index`."""


@runtime_checkable
class RankFileOptions(Source, Protocol):
    """A source that takes the options made for rank files."""

    def with_options(self, *, check_crc: bool, assume_shard_order: str | None) -> Source:
        """Return the source with `--check-crc` and `--assume-shard-order` as the user gave them."""


class OutputLayout(Protocol):
    """Where things lie in the published folder."""

    name: str

    def artifact_type(self, base: BaseModel) -> str:
        """Return the manifest's `artifact_type`."""

    def tensor_directory(self, base: BaseModel) -> str:
        """Return the folder of the trained weights, relative POSIX path, `.` for the root."""

    def weights_stem(self, base: BaseModel) -> str:
        """Return the file stem of the weights, such as `diffusion_pytorch_model`."""

    def copies(self, base: BaseModel) -> Mapping[str, str]:
        """Return base file -> output file (relative POSIX paths) for everything copied."""


class Transport(Protocol):
    """Moves bytes from any rank to rank 0; collective in the order of the plan's buckets.

    A message is a contiguous one-dimensional uint8 CPU tensor whose size both sides know.
    """

    name: str

    def transfer(
        self,
        *,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """Send `outgoing` to rank 0 and, on rank 0, fill `incoming` (sender, message) in place.

        Messages between two ranks keep their order. Returns when all tensors may be reused.

        Raises:
            PeerError: The other side of a message is gone.
        """

    def close(self) -> None:
        """Release groups and buffers."""
