"""Which rank reads which file; and whether copies on several machines are the same file."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from .errors import SourceError
from .group import Group
from .records import SourceFile


def deal_files(listings: Sequence[Sequence[SourceFile]]) -> dict[str, int]:
    """Deal every file to one rank that sees it, balanced by bytes; equal on every rank.

    Raises:
        SourceError: One path has different sizes on two machines.
    """
    seen: dict[str, list[int]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for rank, listing in enumerate(listings):
        for file in listing:
            if sizes.setdefault(file.path, file.nbytes) != file.nbytes:
                raise SourceError(
                    "source-disagrees",
                    f"`{file.path}` differs between machines",
                    expected=f"{sizes[file.path]} bytes as on rank {seen[file.path][0]}",
                    found=f"{file.nbytes} bytes on rank {rank}",
                )
            seen[file.path].append(rank)
    load = [0] * len(listings)
    holders: dict[str, int] = {}
    for path in sorted(sizes, key=lambda path: (-sizes[path], _natural(path))):
        rank = min(seen[path], key=lambda rank: (load[rank], rank))
        holders[path] = rank
        load[rank] += sizes[path]
    return holders


def compare_copies(
    listings: Sequence[Sequence[SourceFile]], *, local_dir: Path, group: Group
) -> None:
    """Compare files of one path and size that are not one file on a shared disk.

    A sample of each is digested: both ends, where torch's files keep the checksums of everything
    between, and blocks of the rest. A difference elsewhere in a file without checksums is not seen.
    Files of one inode number and one time to the nanosecond count as one, and are not sampled.

    Raises:
        SourceError: Two machines hold different files under one path.

    Ranks: collective.
    """
    seen: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for rank, listing in enumerate(listings):
        for file in listing:
            seen[file.path][rank] = (file.inode, file.mtime_ns)
    doubtful = [path for path in sorted(seen) if len(set(seen[path].values())) > 1]
    if not doubtful:
        return

    def sample() -> bytes:
        own = [path for path in doubtful if group.rank in seen[path]]
        return json.dumps({path: sample_digest(local_dir / path) for path in own}).encode()

    samples = group.exchange("samples", group.prepare("sample-copies", sample))

    def compare() -> None:
        first: dict[str, tuple[int, str]] = {}
        for rank, payload in enumerate(samples):
            for path, digest in json.loads(payload).items():
                known_rank, known = first.setdefault(path, (rank, digest))
                if known != digest:
                    raise SourceError(
                        "source-disagrees",
                        f"`{path}` differs between machines",
                        expected=f"the same content on ranks {known_rank} and {rank}",
                        found="files of one size with different content",
                        hint="the machines hold files of different steps or runs under one path",
                    )

    group.prepare("compare-copies", compare, is_shared=True)


def sample_digest(path: Path, *, blocks: int = 64, block_nbytes: int = 4096) -> str:
    """Digest of a file's first 64 KiB, last 1 MiB and evenly spread blocks."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        ranges = [(0, 2**16), (max(0, size - 2**20), 2**20)]
        ranges += [(size * number // blocks, block_nbytes) for number in range(blocks)]
        for start, nbytes in ranges:
            digest.update(os.pread(file.fileno(), nbytes, start))
    return digest.hexdigest()


def _natural(path: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]
