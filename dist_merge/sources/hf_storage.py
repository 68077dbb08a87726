"""torch DCP with Hugging Face storage: safetensors files of pieces, offsets in their headers.

Source: torch/distributed/checkpoint/hf_storage.py and _hf_utils.py. There is no index and no full
shape: a tensor ends where its last piece does.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ArtifactError, SourceError, make_list
from ..records import LocalShard, SourceFile
from ..safetensors_header import SafetensorsHeader, read_header
from .inert_pickle import unreadable
from .keys import clean_names
from .mapped import MappedFile
from .state_key import OPTIMIZER_NAMES, TOP, choose_state

NAME = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
SHARDING_INFO = "DCP_SHARDING_INFO"
# Keys under which savers put whole state dicts; the format keeps names only, joined by dots.
STATE_NAMES = frozenset({"model", "ema", "ema_model", "model_ema"}) | OPTIMIZER_NAMES


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece in one file; `begin` is the byte of its first element."""

    dtype: str
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int


@dataclass
class HfStorageSource:
    """A folder of such files; `shapes` and `keys` are set once the ranks shared their headers."""

    backend: str = "hf"
    is_pickle: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    index_notes: tuple[str, ...] = ()

    def find_files(self, local_dir: Path) -> list[SourceFile]:
        """See `contracts.Source`."""
        found = []
        for name in sorted(os.listdir(local_dir)):
            path = local_dir / name
            if name.endswith(".safetensors") and path.is_file():
                stat = path.stat()
                found.append(SourceFile(name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
        if not found:
            raise SourceError(
                "no-hf-files",
                "the folder holds no safetensors files",
                where=f"`{local_dir}`",
                hint="pass the folder of shard-00001-model-00001-of-00001.safetensors and the like",
            )
        return found

    def read_index(self, local_dir: Path, files: Sequence[SourceFile]) -> bytes:
        """See `contracts.IndexedSource`; every rank gives the ends of its own pieces."""
        ends: dict[str, list[int]] = {}
        for file in files:
            for key, piece in read_pieces(local_dir / file.path).items():
                stops = [a + n for a, n in zip(piece.offsets, piece.sizes, strict=True)]
                ends[key] = join_ends(key, ends.get(key, stops), stops, where=file.path)
        return json.dumps(ends).encode()

    def with_index(self, payloads: Sequence[bytes], *, state_key: str | None) -> HfStorageSource:
        """See `contracts.IndexedSource`."""
        ends: dict[str, list[int]] = {}
        for payload in payloads:
            for key, stops in json.loads(payload).items():
                ends[key] = join_ends(key, ends.get(key, stops), stops, where="headers")
        counts = Counter(name_state(key) for key in ends)
        state = choose_state(counts, state_key=state_key)
        chosen = {strip_state(key): key for key in ends if name_state(key) == state}
        names, notes = clean_names(chosen, where="the files' headers")
        others = [name for name in counts if name != state]
        if others:
            notes += (f"merged state dict `{state}`; left aside: {make_list(others)}",)
        return HfStorageSource(
            shapes={fqn: tuple(ends[chosen[key]]) for fqn, key in names.items()},
            keys={chosen[key]: fqn for fqn, key in names.items()},
            index_notes=notes,
        )

    def check_complete(self, names: Sequence[str]) -> int:
        """See `contracts.Source`.

        How many files there should be is not recorded, and a rank without tensors writes none:
        that pieces tile the base's shapes is what proves completeness.
        """
        numbers = [int(match.group(1)) for name in names if (match := NAME.fullmatch(name))]
        return max(numbers, default=1)

    def open(self, local_dir: Path, files: Sequence[SourceFile]) -> HfStorageReader:
        """See `contracts.Source`."""
        opened = {}
        for file in files:
            path = local_dir / file.path
            opened[file.path] = (MappedFile(path), read_pieces(path))
        return HfStorageReader(self, opened)


class HfStorageReader:
    """Opened files: path -> mapping and pieces by key."""

    def __init__(
        self, source: HfStorageSource, opened: dict[str, tuple[MappedFile, dict[str, Piece]]]
    ) -> None:
        self._source = source
        self._opened = opened

    def describe(self, holder: int) -> list[LocalShard]:
        """See `contracts.SourceReader`."""
        return [
            LocalShard(
                fqn,
                self._source.shapes[fqn],
                piece.dtype,
                piece.offsets,
                piece.sizes,
                holder,
                file,
                key,
            )
            for file, (_, pieces) in self._opened.items()
            for key, piece in pieces.items()
            if (fqn := self._source.keys.get(key)) is not None
        ]

    def read(self, source_file: str, source_key: str) -> torch.Tensor:
        """See `contracts.SourceReader`."""
        mapped, pieces = self._opened[source_file]
        piece = pieces[source_key]
        return mapped.read_tensor(start=piece.begin, dtype=piece.dtype, shape=piece.sizes)

    def notes(self) -> list[str]:
        """See `contracts.SourceReader`."""
        return list(self._source.index_notes)

    def close(self) -> None:
        """See `contracts.SourceReader`; a mapping ends with the last tensor in it."""
        self._opened = {}


def read_pieces(path: Path) -> dict[str, Piece]:
    """Read one file's header.

    Raises:
        SourceError: It is damaged, says no offsets, or says them wrongly.
    """
    try:
        header = read_header(path)
    except ArtifactError as error:
        raise unreadable(path, error.found or error.what) from error
    offsets = read_offsets(path, header)
    return {
        key: Piece(entry.spec.dtype, entry.spec.shape, offsets[key], header.nbytes + entry.begin)
        for key, entry in header.tensors.items()
    }


def read_offsets(path: Path, header: SafetensorsHeader) -> dict[str, tuple[int, ...]]:
    """Offsets of every tensor in the file, from the header's own field."""
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        raise SourceError(
            "already-merged",
            "a safetensors file holds whole tensors: there is nothing to merge",
            where=f"`{path.name}`",
            expected=f"`{SHARDING_INFO}` in its header",
            hint="use the folder as it is; a folder `sharded` below it would hold the pieces",
        )
    try:
        info = json.loads(text)
        offsets = {key: check_offsets(info[key]["saved_offsets"]) for key in header.tensors}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise unreadable(path, f"`{SHARDING_INFO}`: {type(error).__name__}: {error}") from error
    for key, entry in header.tensors.items():
        if len(offsets[key]) != len(entry.spec.shape):
            raise unreadable(path, f"`{key}`: {offsets[key]} for shape {entry.spec.shape}")
    return offsets


def check_offsets(value: Any) -> tuple[int, ...]:
    """Return a list of whole numbers as a tuple."""
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise ValueError(f"offsets {value!r}")
    return tuple(value)


def join_ends(key: str, first: list[int], second: list[int], *, where: str) -> list[int]:
    """The larger end per dim."""
    if len(first) != len(second):
        raise SourceError(
            "shape-disagrees",
            f"tensor `{key}`: its pieces have different numbers of dims",
            where=f"`{where}`",
            expected=str(len(first)),
            found=str(len(second)),
        )
    return [max(pair) for pair in zip(first, second, strict=True)]


def name_state(key: str) -> str:
    """State dict a key belongs to; the format only keeps names, so only known ones are told."""
    first, dot, _ = key.partition(".")
    return first if dot and first in STATE_NAMES else TOP


def strip_state(key: str) -> str:
    """A key without its state dict's name."""
    return key if name_state(key) == TOP else key.partition(".")[2]
