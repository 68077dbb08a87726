"""Find, deal, open and describe the sharded checkpoint: headers and metadata, no tensor bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .actor_config import read_actor_config
from .adapters.keys import parse_key
from .contracts import IndexedSource, RankFileOptions, Source, SourceReader
from .deal_sources import compare_copies, deal_files
from .errors import RequestError, SourceError
from .files import sha256_file
from .group import Group
from .records import SourceFile, SourceInventory
from .request import ModelMergerConfig
from .sources import SOURCES
from .sources.detect import Detected, choose_kind, find_kinds
from .wire import decode_files, decode_shards, encode_files, encode_shards

# A machine that sees no file of the checkpoint is none of these when another one does.
NOTHING_HERE = frozenset({"local-dir-missing", "no-rank-files", "no-dcp-files", "no-hf-files"})


@dataclass(frozen=True)
class OpenSources:
    """The inventory all ranks share, and the files this rank has opened.

    `hash` takes the SHA256 of what this rank holds. `local_dir` is the folder that holds the
    files: the one asked for, or the one found below it; None for a live model. `device` is the
    CUDA device of this rank's shards where every rank's lie on one, such as `cuda:3`.
    """

    inventory: SourceInventory
    reader: SourceReader
    hash: Callable[[Group], dict[str, str]]
    local_dir: Path | None
    device: str | None = None


def inspect_sources(config: ModelMergerConfig, *, group: Group) -> OpenSources:
    """List, deal, open and describe the checkpoint's files.

    Raises:
        SourceError: Files are missing, unreadable or contradict each other.
        RequestError: Pickle input without `trust_checkpoint`.

    Ranks: collective.
    """
    detected = detect_source(config, group=group)
    local_dir = Path(str(config.local_dir)) / detected.folder
    source = group.prepare(
        "choose-source", lambda: choose_source(config, detected.backend), is_shared=True
    )
    visible, absent = group.prepare("list-sources", lambda: list_visible(source, local_dir))
    listings = [decode_files(p) for p in group.exchange("listing", encode_files(visible))]
    if absent is not None and not any(listings):
        raise absent
    holders = group.prepare("deal-sources", lambda: deal_files(listings), is_shared=True)
    compare_copies(listings, local_dir=local_dir, group=group)
    own = tuple(file for file in visible if holders[file.path] == group.rank)
    config_dirs = list_config_dirs(config, local_dir, is_searched=isinstance(source, IndexedSource))
    source = share_index(source, config, local_dir=local_dir, own_files=own, group=group)
    world_size = group.prepare(
        "check-sources", lambda: source.check_complete(sorted(holders)), is_shared=True
    )
    reader = group.prepare("open-sources", lambda: source.open(local_dir, own))
    shards = group.prepare("describe-sources", lambda: reader.describe(group.rank))
    described = [
        decode_shards(p) for p in group.exchange("shards", encode_shards(shards, reader.notes()))
    ]
    # An adapter that is only exported needs no config of the model.
    needs_config = config.fuse_lora or not all(
        parse_key(shard.fqn) for shards, _ in described for shard in shards
    )
    actor_config, sha256 = read_shared_config(config_dirs, group=group, is_needed=needs_config)
    files = {file.path: file for listing in listings for file in listing}
    notes = [*detected.notes, *(note for _, notes in described for note in notes)]
    inventory = SourceInventory(
        backend=source.backend,
        files=tuple(files[path] for path in sorted(files)),
        holders=holders,
        shards=tuple(shard for shards, _ in described for shard in shards),
        world_size=world_size,
        actor_config=actor_config,
        actor_config_sha256=sha256,
        notes=tuple(dict.fromkeys(notes)),
    )
    return OpenSources(inventory, reader, partial(hash_sources, local_dir, own), local_dir)


def detect_source(config: ModelMergerConfig, *, group: Group) -> Detected:
    """Find out which kind of checkpoint lies where, unless the user said the kind.

    Ranks: collective; every rank looks at what its machine sees.
    """
    if config.backend != "auto":
        return Detected(config.backend)
    local_dir = Path(str(config.local_dir))

    def look() -> bytes:
        return json.dumps(find_kinds(local_dir) if local_dir.is_dir() else None).encode()

    seen = [json.loads(p) for p in group.exchange("kinds", group.prepare("look", look))]

    def choose() -> Detected:
        if all(kinds is None for kinds in seen):
            check_local_dir(local_dir)
        return choose_kind([kinds or {} for kinds in seen], local_dir=local_dir)

    return group.prepare("detect", choose, is_shared=True)


def choose_source(config: ModelMergerConfig, backend: str) -> Source:
    """Return the source for `backend`; pickled sources need the user's acknowledgement."""
    source = SOURCES[backend]
    indexed = source if isinstance(source, IndexedSource) else None
    if not config.trust_checkpoint and (indexed is None or indexed.is_pickle):
        raise RequestError(
            "untrusted-checkpoint",
            "Pickled rank checkpoints require explicit trust_checkpoint=True",
            hint="pass --trust-checkpoint; files are opened without running code from them",
        )
    if config.state_key is not None and indexed is None:
        raise RequestError(
            "bad-option",
            "`state_key` is for DCP folders",
            expected="no --state-key: rank files hold one state dict",
        )
    if isinstance(source, RankFileOptions):
        return source.with_options(
            check_crc=config.check_crc, assume_shard_order=config.assume_shard_order
        )
    for name in ("check_crc", "assume_shard_order"):
        if getattr(config, name):
            raise RequestError(
                "bad-option",
                f"`{name}` is for rank files",
                expected=f"no --{name.replace('_', '-')} for a checkpoint of kind `{backend}`",
            )
    return source


def list_visible(source: Source, local_dir: Path) -> tuple[list[SourceFile], SourceError | None]:
    """List the files this machine sees; none, and the error, where others may have them all."""
    try:
        check_local_dir(local_dir)
        return source.find_files(local_dir), None
    except SourceError as error:
        if error.error_id not in NOTHING_HERE:
            raise
        return [], error


def check_local_dir(local_dir: Path) -> None:
    """Raise SourceError when the folder is not there."""
    if not local_dir.is_dir():
        raise SourceError(
            "local-dir-missing",
            "the checkpoint folder does not exist or is no folder",
            where=f"`{local_dir}`",
            hint="pass the folder that holds the checkpoint's files as --local_dir",
        )


def share_index(
    source: Source,
    config: ModelMergerConfig,
    *,
    local_dir: Path,
    own_files: Sequence[SourceFile],
    group: Group,
) -> Source:
    """Give every rank the index of all files, where the source has one. Ranks: collective."""
    if not isinstance(source, IndexedSource):
        return source
    indexed = source
    index = group.prepare("read-index", lambda: indexed.read_index(local_dir, own_files))
    payloads = group.exchange("index", index)
    return group.prepare(
        "share-index",
        lambda: indexed.with_index(payloads, state_key=config.state_key),
        is_shared=True,
    )


def list_config_dirs(
    config: ModelMergerConfig, local_dir: Path, *, is_searched: bool
) -> list[Path]:
    """Folders where the trained model's config may lie; the first that has one counts.

    Formats that no trainer of ours writes a config into are searched: the folder and its parent.
    """
    if config.hf_model_config_path is not None:
        return [Path(config.hf_model_config_path)]
    folders = [local_dir / "huggingface"]
    if is_searched:
        parent = local_dir.resolve().parent
        folders += [local_dir, parent / "huggingface", parent]
    return folders


def read_shared_config(
    folders: Sequence[Path], *, group: Group, is_needed: bool
) -> tuple[dict[str, Any] | None, str | None]:
    """Read the actor's config on rank 0 and hand it to all ranks. Ranks: collective."""

    def read() -> bytes:
        if group.rank != 0:
            return b""
        found = [folder for folder in folders if (folder / "config.json").is_file()]
        if not found and not is_needed:
            return json.dumps([None, None]).encode()
        return json.dumps(read_actor_config((found or folders)[0])).encode()

    payload = group.prepare("read-actor-config", read)
    actor, sha256 = json.loads(group.exchange("actor-config", payload)[0])
    return actor, sha256


def hash_sources(local_dir: Path, files: Sequence[SourceFile], group: Group) -> dict[str, str]:
    """SHA256 of the files this rank holds, checked to be unchanged since the inspection.

    Raises:
        SourceError: A file changed.
    """
    result = {}
    for file in files:
        result[file.path] = sha256_file(local_dir / file.path, on_progress=group.advance)
        check_unchanged(local_dir, file)
    return result


def check_unchanged(local_dir: Path, file: SourceFile) -> None:
    """Raise SourceError when size, time or inode of a file differ from the inspection's."""
    stat = (local_dir / file.path).stat()
    if (stat.st_size, stat.st_mtime_ns, stat.st_ino) != (file.nbytes, file.mtime_ns, file.inode):
        raise SourceError(
            "source-changed",
            "a checkpoint file changed during the merge",
            where=f"`{file.path}`",
            hint="let the training job finish its save, then merge again",
        )
