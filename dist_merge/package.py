"""Copy the frozen files of the base into the staging folder, and write the weights' index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import BaseModelError
from .files import (
    copy_file,
    encode_json,
    make_parents,
    read_json,
    sha256_file,
    write_json,
    write_new_file,
)
from .records import BaseModel, MergePlan, SourceFile


@dataclass(frozen=True)
class PackagedFiles:
    """SHA256 of what was copied: by output path and by base path, and the edited configs."""

    files: Mapping[str, str]
    base_files: Mapping[str, str]
    config_transform_files: tuple[str, ...]


def package_base_files(
    base: BaseModel,
    base_dir: Path,
    *,
    copies: Mapping[str, str],
    artifact_dir: Path,
    on_progress: Callable[[int], None] | None = None,
) -> PackagedFiles:
    """Copy base files byte for byte; configs lose their location fields.

    Raises:
        BaseModelError: A base file changed since the inspection.
        VerificationError: A copy differs from its original.

    Ranks: rank 0 only. Memory: one piece.
    """
    files: dict[str, str] = {}
    base_files: dict[str, str] = {}
    edited: list[str] = []
    known = {file.path: file for file in base.files}
    for source, destination in sorted(copies.items()):
        path = make_parents(artifact_dir, destination)
        check_unchanged(base_dir, known[source])
        removed = base.edited_configs.get(source, ())
        if removed:
            base_files[source] = sha256_file(base_dir / source)
            write_new_file(path, remove_fields(base_dir / source, removed))
            files[destination] = sha256_file(path)
            edited.append(destination)
        else:
            digest = copy_file(base_dir / source, path, on_progress=on_progress)
            files[destination] = base_files[source] = digest
        check_unchanged(base_dir, known[source])
    return PackagedFiles(files, base_files, tuple(edited))


def remove_fields(path: Path, fields: tuple[str, ...]) -> bytes:
    """Return a JSON config without some top-level fields, in the order it had."""
    data = read_json(path, kind=BaseModelError)
    return encode_json({k: v for k, v in data.items() if k not in fields}, sort_keys=False)


def check_unchanged(base_dir: Path, file: SourceFile) -> None:
    """Raise BaseModelError when size, time or inode differ from the inspection's."""
    stat = (base_dir / file.path).stat()
    if (stat.st_size, stat.st_mtime_ns, stat.st_ino) != (file.nbytes, file.mtime_ns, file.inode):
        raise BaseModelError(
            "base-changed",
            "a file of the base model changed during the merge",
            where=f"`{file.path}`",
            hint="nothing else may write to the base; run again",
        )


def write_index(plan: MergePlan, artifact_dir: Path) -> None:
    """Write the index of the output shards."""
    assert plan.index_path is not None
    weight_map = {
        tensor.name: Path(shard.path).name
        for shard in plan.weight_shards
        for tensor in shard.tensors
    }
    total = sum(shard.nbytes for shard in plan.weight_shards)
    write_json(
        artifact_dir / plan.index_path,
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )
