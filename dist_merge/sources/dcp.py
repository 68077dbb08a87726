"""A torch DCP folder: `.metadata` beside `__<rank>_<n>.distcp` (torch, accelerate, torchtitan)."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import SourceError, make_list
from ..records import DTYPES, LocalShard, SourceFile
from .dcp_metadata import (
    DcpMetadata,
    StoredChunk,
    StoredTensor,
    decode_metadata,
    encode_metadata,
    invalid,
    read_metadata,
)
from .inert_pickle import unreadable
from .keys import clean_names
from .mapped import MappedFile
from .saved_tensor import find_tensor
from .state_key import TOP, choose_state

METADATA = ".metadata"
UNFINISHED = ".metadata.tmp"
SUFFIX = ".distcp"
RANK = re.compile(r"__(\d+)_\d+\.distcp")
# A save writes `.metadata` last; copies of a folder change times by less than this.
MAX_LATE_NS = 60 * 10**9


@dataclass
class DcpSource:
    """A DCP folder.

    Set once the index is shared: the model's tensors by cleaned name, and by file the byte at which
    its last tensor of any kind ends.
    """

    backend: str = "dcp"
    is_pickle: bool = True
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    index_notes: tuple[str, ...] = ()

    def find_files(self, local_dir: Path) -> list[SourceFile]:
        """See `contracts.Source`."""
        names = sorted(os.listdir(local_dir))
        if UNFINISHED in names:
            raise unfinished(f"`{UNFINISHED}`", where=local_dir)
        found = []
        for name in names:
            path = local_dir / name
            if (name == METADATA or name.endswith(SUFFIX)) and path.is_file():
                stat = path.stat()
                found.append(SourceFile(name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
        if not found:
            raise SourceError(
                "no-dcp-files",
                "the folder holds no `.metadata` and no .distcp files",
                where=f"`{local_dir}`",
                hint="pass the folder that `torch.distributed.checkpoint` saved to",
            )
        return found

    def read_index(self, local_dir: Path, files: Sequence[SourceFile]) -> bytes:
        """See `contracts.IndexedSource`; the rank that holds `.metadata` gives its content."""
        if METADATA not in {file.path for file in files}:
            return b""
        return encode_metadata(read_metadata(local_dir / METADATA))

    def with_index(self, payloads: Sequence[bytes], *, state_key: str | None) -> DcpSource:
        """See `contracts.IndexedSource`."""
        given = [payload for payload in payloads if payload]
        if not given:
            raise unfinished("no `.metadata` on any machine")
        metadata = decode_metadata(given[0])
        counts = Counter(name_state(tensor) for tensor in metadata.tensors)
        state = choose_state(counts, state_key=state_key)
        chosen = {t.path[-1]: t for t in metadata.tensors if name_state(t) == state}
        names, notes = clean_names(chosen, where=f"`{METADATA}`")
        ends: dict[str, int] = {}
        for chunk in (chunk for tensor in metadata.tensors for chunk in tensor.chunks):
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.nbytes)
        return DcpSource(
            ends=ends,
            tensors={fqn: chosen[key] for fqn, key in names.items()},
            index_notes=(*notes, *describe_rest(metadata, counts, state)),
        )

    def check_complete(self, names: Sequence[str]) -> int:
        """See `contracts.Source`."""
        needed = {chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks}
        missing = needed - set(names)
        if missing:
            raise SourceError(
                "dcp-files-missing",
                f"{len(missing)} of {len(needed)} files of the checkpoint are missing",
                expected="every file that `.metadata` names, on some machine",
                found=f"no {make_list(missing)}",
                hint="copy the missing files into the folder, or use another checkpoint",
            )
        writers = {int(match.group(1)) for name in needed if (match := RANK.fullmatch(name))}
        return max(writers, default=0) + 1

    def open(self, local_dir: Path, files: Sequence[SourceFile]) -> DcpReader:
        """See `contracts.Source`."""
        for file in files:
            if file.nbytes < self.ends.get(file.path, 0):
                raise unreadable(
                    local_dir / file.path,
                    f"{file.nbytes} bytes, of at least {self.ends[file.path]}",
                )
        own = {file.path for file in files}
        reader = DcpReader(self.index_notes)
        for fqn, tensor in self.tensors.items():
            for chunk in choose_chunks(tensor):
                if chunk.file in own:
                    reader.add(local_dir / chunk.file, fqn, tensor, chunk)
        late = find_late(local_dir, files)
        if late:
            reader.add_note(
                f"newer than `{METADATA}`: {make_list(late)}; if a save over an older one was "
                "interrupted here, this checkpoint mixes two steps"
            )
        return reader


class DcpReader:
    """Byte ranges of this rank's files."""

    def __init__(self, notes: Iterable[str]) -> None:
        self._notes = list(notes)
        self._files: dict[str, MappedFile] = {}
        self._chunks: dict[tuple[str, str], tuple[str, StoredTensor, StoredChunk]] = {}

    def add(self, path: Path, fqn: str, tensor: StoredTensor, chunk: StoredChunk) -> None:
        """Add one chunk; `path` is the file that holds it."""
        if chunk.file not in self._files:
            self._files[chunk.file] = MappedFile(path)
        key = f"{tensor.key}{list(chunk.offsets)}"
        self._chunks[chunk.file, key] = (fqn, tensor, chunk)

    def add_note(self, note: str) -> None:
        """Add a remark for the log."""
        self._notes.append(note)

    def describe(self, holder: int) -> list[LocalShard]:
        """See `contracts.SourceReader`."""
        shards = []
        for (file, key), (fqn, tensor, chunk) in self._chunks.items():
            if tensor.dtype not in DTYPES:
                raise SourceError(
                    "dtype-unknown",
                    f"tensor `{fqn}` cannot be stored in safetensors",
                    where=f"`{METADATA}`",
                    found=tensor.dtype,
                )
            if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape):
                raise invalid(f"tensor `{fqn}`: a chunk has another number of dims")
            shards.append(
                LocalShard(
                    fqn,
                    tensor.shape,
                    tensor.dtype,
                    chunk.offsets,
                    chunk.sizes,
                    holder,
                    file,
                    key,
                )
            )
        return shards

    def read(self, source_file: str, source_key: str) -> torch.Tensor:
        """See `contracts.SourceReader`.

        Raises:
            SourceError: What the file holds is not what `.metadata` says.
        """
        fqn, tensor, chunk = self._chunks[source_file, source_key]
        mapped = self._files[source_file]
        saved = find_tensor(mapped, start=chunk.start, nbytes=chunk.nbytes)
        for error_id, what, expected, found in (
            ("local-shard-size", "size", str(list(chunk.sizes)), str(list(saved.shape))),
            ("dtype-disagrees", "dtype", tensor.dtype, saved.dtype),
        ):
            if expected != found:
                raise SourceError(
                    error_id,
                    f"tensor `{fqn}`: a stored piece has another {what} than `{METADATA}` says",
                    where=f"`{source_file}`",
                    expected=expected,
                    found=found,
                    hint="the files are of different saves, or were edited",
                )
        return mapped.read_tensor(
            start=saved.start, dtype=saved.dtype, shape=saved.shape, strides=saved.strides
        )

    def notes(self) -> list[str]:
        """See `contracts.SourceReader`."""
        return list(self._notes)

    def close(self) -> None:
        """See `contracts.SourceReader`; the mapping ends with the last tensor in it."""
        self._files, self._chunks = {}, {}


def name_state(tensor: StoredTensor) -> str:
    """Name of the state dict a tensor belongs to: the keys above it."""
    return ".".join(tensor.path[:-1]) or TOP


def choose_chunks(tensor: StoredTensor) -> Sequence[StoredChunk]:
    """Chunks that hold elements; one empty chunk of a tensor that has none."""
    return [chunk for chunk in tensor.chunks if 0 not in chunk.sizes] or tensor.chunks[:1]


def describe_rest(metadata: DcpMetadata, counts: Counter[str], state: str) -> list[str]:
    """Notes about what is left aside."""
    notes = []
    others = {name for name in counts if name != state}
    if others:
        tops = {name.partition(".")[0] or TOP for name in others}
        notes.append(f"merged state dict `{state}`; left aside: {make_list(tops)}")
    if metadata.other_keys:
        notes.append(
            f"{len(metadata.other_keys)} entries that are no tensors were ignored, for example "
            f"`{metadata.other_keys[0]}`"
        )
    return notes


def find_late(local_dir: Path, files: Sequence[SourceFile]) -> list[str]:
    """Files written well after `.metadata`, where this machine has it."""
    path = local_dir / METADATA
    if not path.is_file():
        return []
    latest = path.stat().st_mtime_ns + MAX_LATE_NS
    return [file.path for file in files if file.mtime_ns > latest]


def unfinished(found: str, *, where: Path | None = None) -> SourceError:
    """Make the error for a save that did not end."""
    return SourceError(
        "dcp-unfinished",
        "the save of this checkpoint did not finish",
        where=f"`{where}`" if where is not None else None,
        expected="`.metadata`, which is written last",
        found=found,
        hint="let the trainer finish its save, or use an earlier checkpoint",
    )
