"""Say what a folder holds by the names in it: which kind of checkpoint, and where below.

Names only; nothing is opened. On several machines each tells what it sees, and all decide alike.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import SourceError
from .dcp import METADATA, SUFFIX, UNFINISHED
from .hf_storage import NAME as HF_NAME
from .rank_files import NAME as RANK_NAME

HERE = "."
# How far below the folder asked for a checkpoint is looked for: `global_step_500/actor`.
MAX_DEPTH = 2
MERGEABLE = {
    "fsdp": "rank files (model_world_size_W_rank_R.pt)",
    "dcp": "a torch DCP folder (.metadata, .distcp)",
    "hf": "DCP with Hugging Face storage (shard-*-model-*.safetensors)",
}
# Pieces of a DCP on a machine that does not have `.metadata`.
DCP_PART = "dcp-part"
OTHERS = {
    DCP_PART: "a DCP whose save did not finish: .distcp files without .metadata",
    "optimizer": "an optimizer's state, no model",
    "zero": "a DeepSpeed ZeRO checkpoint",
    "megatron": "a Megatron checkpoint",
    "accelerate": "accelerate's .bin files (pytorch_model_fsdp*.bin)",
    "plain": "a model in whole files, which is merged already",
}
HINTS = {
    DCP_PART: "let the trainer finish its save, or use an earlier checkpoint",
    "optimizer": "pass the folder the model was saved to",
    "zero": "convert it with DeepSpeed's zero_to_fp32.py; this format is not read",
    "megatron": "convert it with Megatron's own tools; this format is not read",
    "accelerate": "save with state_dict_type SHARDED_STATE_DICT; these files are not read",
    "plain": "use that folder as it is",
}
ZERO = re.compile(r".*(_model_states|zero_pp_rank_\d+_mp_rank_\d+_optim_states)\.pt")
OPTIMIZER_FILE = re.compile(r"optim_world_size_\d+_rank_\d+\.pt")
# accelerate names the optimizer's DCP folder so, beside the model's.
OPTIMIZER_DIR = re.compile(r"optim(izer)?(s|_state|_\d+)?")
ACCELERATE = re.compile(r"pytorch_model_fsdp(_\d+)?(_rank\d+)?\.bin")
MEGATRON_DIR = re.compile(r"mp_rank_\d+(_\d+)*")
PLAIN = re.compile(
    r"model_index\.json|.+\.safetensors(\.index\.json)?|(pytorch_|diffusion_pytorch_)?model.*\.bin"
)


@dataclass(frozen=True)
class Detected:
    """Kind of the checkpoint, its folder relative to the one asked for, remarks for the log."""

    backend: str
    folder: str = HERE
    notes: tuple[str, ...] = ()


def find_kinds(local_dir: Path) -> dict[str, list[str]]:
    """Kinds in the folder (`.`) and in those below, by relative path; what this machine sees.

    Links to folders are followed one level at a time and no further than `MAX_DEPTH`.
    """
    found: dict[str, list[str]] = {}

    def visit(folder: Path, relative: str, depth: int) -> None:
        files: list[str] = []
        folders: list[str] = []
        for entry in os.scandir(folder):
            (folders if entry.is_dir() else files).append(entry.name)
        kinds = name_kinds(folder.resolve().name, files, folders)
        if kinds:
            found[relative] = kinds
        if depth < MAX_DEPTH:
            for name in sorted(folders):
                below = name if relative == HERE else f"{relative}/{name}"
                if os.access(folder / name, os.R_OK | os.X_OK):
                    visit(folder / name, below, depth + 1)

    visit(local_dir, HERE, 0)
    return found


def name_kinds(folder: str, files: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Kinds of checkpoint that the entries of one folder are."""

    def has(test: Callable[[str], object], names: Iterable[str] = files) -> bool:
        return any(test(name) for name in names)

    kinds = []
    if has(RANK_NAME.fullmatch):
        kinds.append("fsdp")
    if "common.pt" in files or has(MEGATRON_DIR.fullmatch, folders):
        kinds.append("zero" if has(ZERO.fullmatch) else "megatron")
    elif has(ZERO.fullmatch):
        kinds.append("zero")
    elif OPTIMIZER_DIR.fullmatch(folder) and METADATA in files:
        kinds.append("optimizer")
    elif METADATA in files:
        kinds.append("dcp")
    elif UNFINISHED in files or has(lambda name: name.endswith(SUFFIX)):
        kinds.append(DCP_PART)
    if has(HF_NAME.fullmatch):
        kinds.append("hf")
    if has(ACCELERATE.fullmatch):
        kinds.append("accelerate")
    if not kinds and has(OPTIMIZER_FILE.fullmatch):
        kinds.append("optimizer")
    if not kinds and has(PLAIN.fullmatch):
        kinds.append("plain")
    return kinds


def choose_kind(seen: Sequence[Mapping[str, Sequence[str]]], *, local_dir: Path) -> Detected:
    """Decide what to merge, given what every rank's machine sees.

    Raises:
        SourceError: There is nothing this package reads, or more than one such thing.
    """
    kinds = join_kinds(seen)
    here = [kind for kind in kinds.get(HERE, []) if kind in MERGEABLE]
    if len(here) > 1:
        raise ambiguous(
            [f"{MERGEABLE[kind]}: --backend {kind}" for kind in here],
            where=local_dir,
            hint="say which with --backend",
        )
    if here:
        return Detected(here[0], HERE, (f"found {MERGEABLE[here[0]]}",))
    if kinds.get(HERE):
        raise unsupported(HERE, kinds[HERE][0], local_dir=local_dir, below=list_below(kinds))
    below = list_below(kinds)
    if len(below) > 1:
        raise ambiguous(
            [f"`{folder}`: {MERGEABLE[kind]}" for folder, kind in below],
            where=local_dir,
            hint=f"pass one of them, for example --local_dir {local_dir / below[0][0]}",
        )
    if below:
        ((folder, kind),) = below
        return Detected(kind, folder, (f"found {MERGEABLE[kind]} in `{folder}`, merging that",))
    for folder in sorted(kinds):
        raise unsupported(folder, kinds[folder][0], local_dir=local_dir, below=[])
    raise SourceError(
        "no-checkpoint",
        "the folder holds no checkpoint, nor do the folders below it",
        where=f"`{local_dir}`",
        expected="; ".join(MERGEABLE.values()),
        hint="pass the folder the trainer saved the model to, often `actor`",
    )


def join_kinds(seen: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Kinds by folder over all machines; one machine's `.metadata` completes the others' files."""
    joined: dict[str, list[str]] = {}
    for findings in seen:
        for folder, kinds in findings.items():
            row = joined.setdefault(folder, [])
            row += [kind for kind in kinds if kind not in row]
    for folder, row in joined.items():
        for whole in ("dcp", "optimizer", "megatron"):
            if whole in row and DCP_PART in row:
                joined[folder] = [kind for kind in row if kind != DCP_PART]
    return joined


def list_below(kinds: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Folders below that can be merged, with the kind."""
    return [
        (folder, kind)
        for folder in sorted(kinds)
        for kind in kinds[folder]
        if folder != HERE and kind in MERGEABLE
    ]


def unsupported(
    folder: str, kind: str, *, local_dir: Path, below: Sequence[tuple[str, str]]
) -> SourceError:
    """Make the error for a checkpoint that is not read, or needs no merge."""
    hint = HINTS[kind]
    if below:
        hint = f"{MERGEABLE[below[0][1]]} lies below: --local_dir {local_dir / below[0][0]}"
    where = local_dir if folder == HERE else local_dir / folder
    if kind == DCP_PART:
        return SourceError(
            "dcp-unfinished",
            "the save of this checkpoint did not finish",
            where=f"`{where}`",
            expected="`.metadata`, which is written last",
            found=".distcp files without it",
            hint=hint,
        )
    return SourceError(
        "already-merged" if kind == "plain" else "checkpoint-unsupported",
        f"the folder holds {OTHERS[kind]}",
        where=f"`{where}`",
        hint=hint,
    )


def ambiguous(found: Sequence[str], *, where: Path, hint: str) -> SourceError:
    """Make the error for more than one checkpoint."""
    shown = "; ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    return SourceError(
        "checkpoint-ambiguous",
        "the folder holds more than one checkpoint",
        where=f"`{where}`",
        found=shown,
        hint=hint,
    )
