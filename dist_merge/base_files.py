"""What becomes of every file of the base: copied, replaced, left out, edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .base_weights import is_weight_like
from .errors import BaseModelError, make_list
from .files import LOCATION_FIELDS, is_config, read_json
from .manifest import MANIFEST_NAME
from .records import SourceFile

ADAPTER_DIR = "lora_adapter"


@dataclass(frozen=True)
class SortedFiles:
    """What becomes of every file of the base; paths relative to it."""

    copied: tuple[str, ...]
    replaced: tuple[str, ...]
    left_out: tuple[str, ...]


def sort_files(
    paths: Sequence[str], *, folder: str, components: frozenset[str] | None
) -> SortedFiles:
    """Sort the base's files into copied, replaced and left out.

    `components` are those of the pipeline that is published; None for a lone transformer, which
    takes only its config and Python files.
    """
    copied, replaced, left_out = [], [], []
    for path in paths:
        parts = PurePosixPath(path).parts
        parent = PurePosixPath(path).parent.as_posix()
        is_inside = parts[0] == folder if folder != "." else len(parts) == 1
        if is_inside and is_weight_like(path):
            replaced.append(path)
        elif components is None:
            if parent == folder and (parts[-1] == "config.json" or path.endswith(".py")):
                copied.append(path)
        elif parts[0] not in components and (
            # What an earlier merge wrote beside the model describes the old weights.
            path == MANIFEST_NAME or parts[0] == ADAPTER_DIR or is_weight_like(path)
        ):
            left_out.append(path)
        else:
            copied.append(path)
    return SortedFiles(tuple(copied), tuple(replaced), tuple(left_out))


def check_remote_code(copied: Sequence[str], *, trust_remote_code: bool) -> None:
    """Refuse Python files without the user's consent; they are copied, never imported."""
    found = [path for path in copied if PurePosixPath(path).suffix in (".py", ".pyc", ".so")]
    if found and not trust_remote_code:
        raise BaseModelError(
            "remote-code",
            "the base holds Python files, which would be published with it",
            found=make_list(found),
            hint="read them; to copy them, pass --trust-remote-code",
        )


def describe_files(base_dir: Path, paths: Sequence[str]) -> tuple[SourceFile, ...]:
    """Record what identifies each file unchanged."""
    stats = ((path, (base_dir / path).stat()) for path in paths)
    return tuple(SourceFile(p, s.st_size, s.st_mtime_ns, s.st_ino) for p, s in stats)


def find_edited_configs(base_dir: Path, copied: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Find JSON configs with fields that only tell where a model lay on somebody's disk."""
    edited = {}
    for path in copied:
        if is_config(path):
            data = read_json(base_dir / path, kind=BaseModelError)
            keys = tuple(k for k in LOCATION_FIELDS if isinstance(data, dict) and k in data)
            if keys:
                edited[path] = keys
    return edited
