"""One `model_world_size_W_rank_R.pt` per training rank, as verl and others save FSDP actors."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..errors import SourceError, make_list
from ..records import LocalShard, SourceFile
from .keys import clean_names
from .pieces import Piece, PieceDescriber
from .unpickle import RankFile, load_rank_file
from .zip_check import check_crc

NAME = re.compile(r"model_world_size_([1-9]\d*)_rank_(0|[1-9]\d*)\.pt")


@dataclass
class RankFileSource:
    """A folder of rank files.

    `check_crc` reads every file whole and compares its checksums. `assume_shard_order` is the
    user's word on tensors of which the files do not tell which mesh axis split first.
    """

    backend: str = "fsdp"
    check_crc: bool = False
    assume_shard_order: str | None = None

    def with_options(self, *, check_crc: bool, assume_shard_order: str | None) -> RankFileSource:
        """See `contracts.RankFileOptions`."""
        return replace(self, check_crc=check_crc, assume_shard_order=assume_shard_order)

    def find_files(self, local_dir: Path) -> list[SourceFile]:
        """See `contracts.Source`."""
        found = []
        for name in sorted(os.listdir(local_dir)):
            if NAME.fullmatch(name) and (local_dir / name).is_file():
                stat = (local_dir / name).stat()
                found.append(SourceFile(name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
        if not found:
            inside = [p.parent.name for p in local_dir.glob("*/model_world_size_*_rank_*.pt")]
            raise SourceError(
                "no-rank-files",
                "the folder holds no model_world_size_W_rank_R.pt",
                where=f"`{local_dir}`",
                found=f"such files in {make_list(inside)}" if inside else None,
                hint="pass that folder as --local_dir"
                if inside
                else "pass the folder the trainer wrote its rank files to, often `actor`",
            )
        return found

    def check_complete(self, names: Sequence[str]) -> int:
        """See `contracts.Source`."""
        matches = [match for name in names if (match := NAME.fullmatch(name))]
        sizes = {int(match.group(1)) for match in matches}
        if len(sizes) != 1:
            raise SourceError(
                "mixed-world-sizes",
                "the folder mixes rank files of several runs",
                expected="one world size",
                found=f"world sizes {', '.join(map(str, sorted(sizes)))}",
                hint="move the files of the other run away",
            )
        (world_size,) = sizes
        ranks = {int(match.group(2)) for match in matches}
        missing = sorted(set(range(world_size)) - ranks)
        if missing:
            raise SourceError(
                "rank-files-missing",
                f"{len(missing)} of {world_size} rank files are missing",
                expected=f"ranks 0-{world_size - 1}",
                found=f"no file for rank {format_ranges(missing)}",
                hint="copy the missing files into the folder, or use another checkpoint",
            )
        extra = sorted(ranks - set(range(world_size)))
        if extra:
            raise SourceError(
                "rank-files-extra",
                f"rank files beyond world size {world_size}: rank {format_ranges(extra)}",
                hint="the files were renamed or mixed up",
            )
        return world_size

    def open(self, local_dir: Path, files: Sequence[SourceFile]) -> RankFileReader:
        """See `contracts.Source`."""
        # A machine may hold no file of the checkpoint, nor the folder.
        names = sorted(os.listdir(local_dir)) if local_dir.is_dir() else []
        others = [name for name in names if name.endswith(".pt") and not NAME.fullmatch(name)]
        notes = [f"ignored files that are no model weights: {make_list(others)}"] if others else []
        opened = {}
        for file in files:
            if self.check_crc:
                check_crc(local_dir / file.path)
            opened[file.path] = load_rank_file(local_dir / file.path)
        if self.assume_shard_order:
            notes.append(f"where files do not tell, shard order is {self.assume_shard_order}")
        return RankFileReader(opened, notes, assumed_order=self.assume_shard_order)


class RankFileReader:
    """Opened rank files: path -> state dict."""

    def __init__(
        self, opened: dict[str, RankFile], notes: list[str], *, assumed_order: str | None = None
    ) -> None:
        self._opened = opened
        self._notes = notes
        self._assumed_order = assumed_order
        self._pieces: dict[tuple[str, str], torch.Tensor] = {}

    def describe(self, holder: int) -> list[LocalShard]:
        """See `contracts.SourceReader`."""
        shards = []
        for path, file in self._opened.items():
            match = NAME.fullmatch(path)
            describer = PieceDescriber(
                path=path,
                rank=int(match.group(2)) if match else None,
                is_old=file.is_old,
                assumed_order=self._assumed_order,
            )
            names, notes = clean_names(file.state, where=f"`{path}`")
            self._notes += notes
            for fqn, key in names.items():
                for piece in describer.describe(fqn, key, file.state[key]):
                    shards.append(self._add(piece, holder=holder))
        return shards

    def _add(self, piece: Piece, *, holder: int) -> LocalShard:
        """Keep a piece under its key, for `read`."""
        shard = piece.make_shard(holder)
        where = (shard.source_file, shard.source_key)
        if where in self._pieces:
            raise SourceError(
                "key-collision", f"two pieces are called `{where[1]}`", where=f"`{where[0]}`"
            )
        self._pieces[where] = piece.tensor
        return shard

    def read(self, source_file: str, source_key: str) -> torch.Tensor:
        """See `contracts.SourceReader`."""
        return self._pieces[source_file, source_key]

    def notes(self) -> list[str]:
        """See `contracts.SourceReader`."""
        return list(dict.fromkeys(self._notes))

    def close(self) -> None:
        """See `contracts.SourceReader`."""
        self._opened, self._pieces = {}, {}


def format_ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as ranges: `1, 3-5`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
