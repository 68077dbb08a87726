"""Files of an upload: what a published folder holds, how a hub names it, in which order it goes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .adapters.settings import ADAPTER_DIR
from .base_weights import is_index_file, is_weight_like
from .files import read_json, sha256_file
from .manifest import MANIFEST_NAME, Manifest, parse_manifest
from .model_card import CARD_NAME
from .validate import is_adapter_alone

# What one commit may add; hubs advise against larger ones.
COMMIT_NUM_FILES = 50
COMMIT_NBYTES = 10 * 2**30
# Files by which loaders recognise a model.
ENTRY_NAMES = frozenset({"model_index.json", "config.json", "adapter_config.json", MANIFEST_NAME})


@dataclass(frozen=True)
class LocalFile:
    """One file to upload: its path in the repository, and a local file or bytes."""

    path: str
    content: Path | bytes
    nbytes: int
    sha256: str

    def git_sha1(self) -> str:
        """Hash by which git names this content."""
        digest = hashlib.sha1(b"blob %d\0" % self.nbytes, usedforsecurity=False)
        if isinstance(self.content, bytes):
            digest.update(self.content)
        else:
            with self.content.open("rb") as file:
                while piece := file.read(2**20):
                    digest.update(piece)
        return digest.hexdigest()

    def equals(self, remote: Any) -> bool:
        """Whether the hub's `RepoFile` is this content, by the hash the hub keeps of it."""
        if remote is None or remote.size != self.nbytes:
            return False
        if remote.lfs is not None:
            return bool(remote.lfs.sha256 == self.sha256)
        return bool(remote.blob_id == self.git_sha1())


@dataclass(frozen=True)
class Artifact:
    """A published folder: root of what is uploaded, manifest, and every file with the manifest."""

    folder: Path
    manifest: Manifest
    files: tuple[LocalFile, ...]


def read_artifact(path: Path) -> Artifact:
    """List a published folder's files; of an adapter alone, those of its folder."""
    folder = path / ADAPTER_DIR if is_adapter_alone(path) else path
    manifest = parse_manifest(read_json(folder / MANIFEST_NAME))
    files = [
        LocalFile(name, folder / name, manifest.file_sizes[name], sha256)
        for name, sha256 in sorted(manifest.files.items())
    ]
    own = folder / MANIFEST_NAME
    files.append(LocalFile(MANIFEST_NAME, own, own.stat().st_size, sha256_file(own)))
    return Artifact(folder, manifest, tuple(files))


def order_commits(
    files: Sequence[LocalFile], *, at_once: bool, num_files: int, nbytes: int
) -> list[list[LocalFile]]:
    """Cut files into commits: weights, then other files, at last indexes and entry files.

    A repository whose last commit is missing has no entry file, so no loader takes it for whole.
    `at_once` makes one commit of all, for where readers could otherwise see a mixture.
    """
    if at_once:
        return [list(files)] if files else []
    last = [f for f in files if is_last(f.path)]
    first = [f for f in files if not is_last(f.path)]
    first.sort(key=lambda f: (not is_weight_like(f.path), f.path))
    commits: list[list[LocalFile]] = []
    size = 0
    for file in first:
        if not commits or len(commits[-1]) == num_files or size + file.nbytes > nbytes:
            commits.append([])
            size = 0
        commits[-1].append(file)
        size += file.nbytes
    return commits + ([last] if last else [])


def is_last(path: str) -> bool:
    """Whether a file belongs to the last commit."""
    return is_index_file(path) or PurePosixPath(path).name in ENTRY_NAMES or path == CARD_NAME
