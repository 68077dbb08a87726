"""Hashes, JSON, relative paths, copies: what every step needs of the file system."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from .errors import ArtifactError, MergeError, VerificationError

PIECE_NBYTES = 2**18
MAX_JSON_NBYTES = 64 * 2**20
# Config fields that only tell from where a model was loaded.
LOCATION_FIELDS = ("_name_or_path", "name_or_path")
LEFT_OUT_DIRS = frozenset({".git", ".cache"})


def sha256_file(path: Path, *, on_progress: Callable[[int], None] | None = None) -> str:
    """SHA256 of a file's bytes; `on_progress` is told the bytes of every piece."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(4 * PIECE_NBYTES):
            digest.update(piece)
            if on_progress is not None:
                on_progress(len(piece))
    return digest.hexdigest()


def make_fingerprint(hashes: Mapping[str, str]) -> str:
    """SHA256 over the sorted `path -> SHA256` JSON, separators `,` and `:`."""
    text = json.dumps(dict(hashes), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def encode_json(data: Any, *, sort_keys: bool = True) -> bytes:
    """JSON with 2-space indent and a final newline."""
    return (json.dumps(data, indent=2, sort_keys=sort_keys, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, data: Any) -> None:
    """Write sorted JSON to a new file and flush it to the disk."""
    write_new_file(path, encode_json(data))


def write_new_file(path: Path, content: bytes) -> None:
    """Write a file that must not exist, mode from the umask, flushed to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path, *, kind: type[MergeError] = ArtifactError) -> Any:
    """Read JSON strictly: UTF-8, no duplicate keys, no NaN, bounded size and depth.

    Raises:
        MergeError: Of `kind`, id `bad-json`.
    """
    try:
        if path.stat().st_size > MAX_JSON_NBYTES:
            raise ValueError(f"larger than {MAX_JSON_NBYTES} bytes")
        return json.loads(
            path.read_bytes().decode("utf-8"),
            object_pairs_hook=_unique_object,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise kind(
            "bad-json", "a JSON file cannot be read", where=f"`{path.name}`", found=str(error)
        ) from error


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate keys")
    return result


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def is_safe_path(text: str) -> bool:
    """Tell whether `text` is a plain relative POSIX path that stays inside its folder."""
    parts = PurePosixPath(text).parts
    return (
        bool(parts)
        and not text.startswith("/")
        and text == "/".join(parts)
        and not {"..", "."} & set(parts)
        and "\\" not in text
        and text.isprintable()
        and all(len(part.encode()) < 256 for part in parts)
    )


def is_config(name: str) -> bool:
    """Tell whether a file of a model folder is a config that may hold a location field."""
    base = name.rpartition("/")[2]
    return base == "model_index.json" or ("config" in base and base.endswith(".json"))


def walk_files(root: Path, *, allow_links: bool = True) -> list[str]:
    """List a folder's files as sorted relative POSIX paths; `.git` and `.cache` are left out.

    File links (a hub cache's) are listed when `allow_links`; they are read through later.

    Raises:
        ArtifactError: A link to a folder, a dangling link, a special file, an odd name.
    """
    found: list[str] = []

    def refuse(path: Path, what: str) -> ArtifactError:
        return ArtifactError(
            "bad-entry",
            f"a folder holds {what}",
            where=f"`{path.relative_to(root).as_posix()!r}`",
            hint="remove it, or pass a clean copy of the folder",
        )

    def visit(folder: Path) -> None:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = Path(entry.path)
            relative = path.relative_to(root).as_posix()
            if not is_safe_path(relative):
                raise refuse(path, "an entry whose name is not a plain file name")
            if entry.is_symlink() and (not allow_links or not path.is_file()):
                raise refuse(path, "a link to a folder, to nothing, or where none is allowed")
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in LEFT_OUT_DIRS or not allow_links:
                    visit(path)
            elif stat.S_ISREG(path.stat().st_mode):
                found.append(relative)
            else:
                raise refuse(path, "a device, pipe or socket")

    visit(root)
    return sorted(found)


def make_parents(root: Path, relative: str) -> Path:
    """Make the folders between `root`, which must be there, and a file; returns the file's path.

    A run that was stopped has no `root` any more, and must not bring it back.
    """
    folder = root
    for part in PurePosixPath(relative).parent.parts:
        folder = folder / part
        with suppress(FileExistsError):
            os.mkdir(folder)
    return root / relative


def fsync_dir(path: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_file(
    source: Path, destination: Path, *, on_progress: Callable[[int], None] | None = None
) -> str:
    """Copy a file byte for byte and read the copy back; returns the SHA256.

    Raises:
        VerificationError: The copy on the disk differs from what was read.
    """
    sha256, fast = hashlib.sha256(), xxhash.xxh3_128()
    descriptor = os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with source.open("rb", buffering=0) as reader, os.fdopen(descriptor, "wb") as writer:
        while piece := reader.read(PIECE_NBYTES):
            sha256.update(piece)
            fast.update(piece)
            writer.write(piece)
            if on_progress is not None:
                on_progress(len(piece))
        writer.flush()
        os.fsync(writer.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(writer.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    again = xxhash.xxh3_128()
    with destination.open("rb", buffering=0) as reader:
        while piece := reader.read(4 * PIECE_NBYTES):
            again.update(piece)
    if again.digest() != fast.digest():
        raise VerificationError(
            "copy-differs",
            "a copied file differs from its original",
            where=f"`{destination.name}`",
            hint="a disk or memory fault; check the disk and run again",
        )
    return sha256.hexdigest()
