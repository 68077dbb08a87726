"""What a folder holds, by the names in it; which state dict is the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_merge.errors import SourceError
from dist_merge.sources.detect import Detected, choose_kind, find_kinds
from dist_merge.sources.state_key import choose_state

RANKS = ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]
DCP = [".metadata", "__0_0.distcp", "__1_0.distcp"]
HF = ["shard-00001-model-00001-of-00001.safetensors"]


def make(folder: Path, names: list[str]) -> Path:
    """A folder with empty files; names that end with `/` become folders."""
    for name in names:
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    return folder


def below(folder: str, names: list[str]) -> list[str]:
    """Names inside of a folder."""
    return [f"{folder}/{name}" for name in names]


def detect(folder: Path) -> Detected:
    """What one machine decides."""
    return choose_kind([find_kinds(folder)], local_dir=folder)


@pytest.mark.parametrize(
    ("names", "backend", "folder"),
    [
        ([*RANKS, "optim_world_size_2_rank_0.pt", "huggingface/config.json"], "fsdp", "."),
        ([*RANKS, "huggingface/model.safetensors"], "fsdp", "."),
        (DCP, "dcp", "."),
        ([*DCP, "config.json", "huggingface/config.json"], "dcp", "."),
        (HF, "hf", "."),
        ([*below("pytorch_model_fsdp_0", DCP), *below("optimizer_0", DCP)], "dcp",
         "pytorch_model_fsdp_0"),
        (below("actor", RANKS), "fsdp", "actor"),
        ([*below("global_step_5/actor", RANKS), "latest_checkpointed_iteration.txt"], "fsdp",
         "global_step_5/actor"),
        (below("sharded", HF), "hf", "sharded"),
    ],
)  # fmt: skip
def test_detect_one_checkpoint_found(
    tmp_path: Path, names: list[str], backend: str, folder: str
) -> None:
    """Catches a kind taken for another, and a level that is not resolved or not told."""
    found = detect(make(tmp_path, names))
    assert (found.backend, found.folder) == (backend, folder)
    assert len(found.notes) == 1
    assert (f"`{folder}`" in found.notes[0]) == (folder != ".")


@pytest.mark.parametrize(
    ("names", "error_id", "parts"),
    [
        ([], "no-checkpoint", ["holds no checkpoint"]),
        (["data.pt", "notes/readme.txt"], "no-checkpoint", ["--local_dir", "`actor`"][1:]),
        ([*RANKS, *DCP], "checkpoint-ambiguous", ["--backend fsdp", "--backend dcp"]),
        ([*below("actor", RANKS), *below("critic", RANKS)], "checkpoint-ambiguous",
         ["`actor`", "`critic`", "/actor"]),
        ([*below("step-1", DCP), *below("step-2", DCP)], "checkpoint-ambiguous",
         ["`step-1`", "`step-2`"]),
        (["__0_0.distcp"], "dcp-unfinished", ["did not finish"]),
        (["__0_0.distcp", ".metadata.tmp"], "dcp-unfinished", ["did not finish"]),
        (below("step-1", ["__0_0.distcp"]), "dcp-unfinished", ["/step-1"]),
        (["zero_pp_rank_0_mp_rank_00_model_states.pt"], "checkpoint-unsupported", ["ZeRO"]),
        (["latest", "global_step5/mp_rank_00_model_states.pt"], "checkpoint-unsupported",
         ["ZeRO", "/global_step5"]),
        (["latest", "global_step5/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
         "checkpoint-unsupported", ["ZeRO"]),
        (["mp_rank_00/model_optim_rng.pt"], "checkpoint-unsupported", ["Megatron"]),
        ([*DCP, "common.pt", "metadata.json"], "checkpoint-unsupported", ["Megatron"]),
        (["pytorch_model_fsdp.bin"], "checkpoint-unsupported", ["accelerate"]),
        (["pytorch_model_fsdp_0_rank0.bin"], "checkpoint-unsupported", ["accelerate"]),
        (["optim_world_size_2_rank_0.pt"], "checkpoint-unsupported", ["optimizer"]),
        (below("optimizer_0", DCP), "checkpoint-unsupported", ["optimizer", "/optimizer_0"]),
        (["model_index.json", "transformer/diffusion_pytorch_model.safetensors"],
         "already-merged", ["use that folder as it is"]),
        (["model.safetensors", *below("sharded", HF)], "already-merged", ["/sharded"]),
        (["pytorch_model.bin"], "already-merged", ["whole files"]),
    ],
)  # fmt: skip
def test_detect_anything_else_refused(
    tmp_path: Path, names: list[str], error_id: str, parts: list[str]
) -> None:
    """Catches a folder that is merged although it is unclear or unreadable, and vague messages."""
    with pytest.raises(SourceError) as caught:
        detect(make(tmp_path, names))
    assert caught.value.error_id == error_id
    for part in parts:
        assert part in str(caught.value)


def test_detect_files_on_several_machines() -> None:
    """Catches machines that decide for themselves: only one has `.metadata`."""
    seen = [{"step-1": ["dcp"]}, {"step-1": ["dcp-part"]}, {}]
    found = choose_kind(seen, local_dir=Path("save"))
    assert (found.backend, found.folder) == ("dcp", "step-1")
    with pytest.raises(SourceError, match="dcp-unfinished"):
        choose_kind(seen[1:], local_dir=Path("save"))
    with pytest.raises(SourceError, match="checkpoint-ambiguous"):
        choose_kind([{".": ["dcp"]}, {".": ["fsdp"]}], local_dir=Path("save"))


@pytest.mark.parametrize(
    ("counts", "state_key", "expected"),
    [
        ({"model": 3, "optim.state.w": 2, "optim.param_groups.0": 1}, None, "model"),
        ({".": 3, "optimizer": 6}, None, "."),
        ({".": 1, "model": 3}, "model", "model"),
        ({".": 1, "model": 3}, ".", "."),
        ({"model": 3, "ema": 3}, "ema", "ema"),
        ({"model.transformer": 3}, None, "model.transformer"),
        ({"state.w": 3, "model": 1}, None, "model"),
    ],
)
def test_choose_state_clear_or_said(
    counts: dict[str, int], state_key: str | None, expected: str
) -> None:
    """Catches an optimizer's moments taken for weights, and a choice that is not followed."""
    assert choose_state(counts, state_key=state_key) == expected


@pytest.mark.parametrize(
    ("counts", "state_key", "error_id"),
    [
        ({"model": 3, "ema": 3}, None, "state-key-needed"),
        ({".": 1, "model": 3}, None, "state-key-needed"),
        ({"model": 3}, "ema", "state-key-unknown"),
        ({"model": 3, "optim.state.w": 2}, "optim.state.w", "state-key-unknown"),
        ({"optim.state.w": 2}, None, "no-model-state"),
        ({}, None, "no-model-state"),
    ],
)
def test_choose_state_unclear_refused(
    counts: dict[str, int], state_key: str | None, error_id: str
) -> None:
    """Catches a state dict that is guessed."""
    with pytest.raises(SourceError, match=error_id):
        choose_state(counts, state_key=state_key)
