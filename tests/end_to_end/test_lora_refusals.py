"""Adapters that cannot be right are refused before anything is published, each with its message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dist_merge import MergeError, ModelMergerConfig, merge_model
from tests.end_to_end.test_lora import merge
from tests.unit.test_minimax_h3 import base_dir  # noqa: F401

State = dict[str, torch.Tensor]
MODULE = "transformer_blocks.0.attn.to_q"
FULL = {"r": 4, "lora_alpha": 6, "peft_type": "LORA"}


def write(folder: Path, state: State, **files: Any) -> Path:
    """A checkpoint of one rank with plain tensors; `files` are JSON files, None for none."""
    (folder / "huggingface").mkdir(parents=True)
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    for name, content in {"lora_train_meta": {"r": 4, "lora_alpha": 6}, **files}.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def refuse(folder: Path, run: Path, **options: Any) -> str:
    """Merge, expect an error; returns its text. Nothing may be left behind."""
    source = run / "full" / "huggingface" / "config.json"
    (folder / "huggingface" / "config.json").write_bytes(source.read_bytes())
    target = folder.parent / "out"
    config: dict[str, Any] = {
        "local_dir": folder,
        "base_model": run / "base",
        "target_dir": target,
        "output_format": "transformer",
        "trust_checkpoint": True,
        "quiet": True,
    }
    with pytest.raises(MergeError) as caught:
        merge_model(ModelMergerConfig(**{**config, **options}))
    assert not target.exists()
    assert not [p.name for p in folder.parent.iterdir() if "dist_merge" in p.name]
    return str(caught.value)


def change(key: str, value: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
    """Change or drop one tensor."""

    def apply(state: State) -> State:
        result = dict(state)
        if value is None:
            del result[key]
        else:
            result[key] = value(state[key]).contiguous()
        return result

    return apply


def zero_rows(part: str, size: int, index: int) -> Any:
    """Zero one block of rows of every factor, as a save that lost a rank leaves them."""

    def apply(state: State) -> State:
        result = dict(state)
        for name, tensor in state.items():
            if f".{part}.default." in name:
                rows = -(-tensor.shape[0] // size)
                changed = tensor.clone()
                changed[index * rows : (index + 1) * rows] = 0
                result[name] = changed
        return result

    return apply


def untrain(state: State) -> State:
    """Make every B of the adapter zero."""
    return {n: torch.zeros_like(t) if ".lora_B.default." in n else t for n, t in state.items()}


A, B = (f"{MODULE}.lora_{letter}.default.weight" for letter in "AB")
DAMAGES: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "no_b": (change(B, None), {}, "adapter-incomplete", MODULE),
    "no_a": (change(A, None), {}, "adapter-incomplete", MODULE),
    "short_b": (change(B, lambda t: t[:16]), {}, "adapter-shape", "world size 2"),
    "short_a": (change(A, lambda t: t[:, :8]), {}, "adapter-shape", "world size 4"),
    "short_rank": (change(A, lambda t: t[:2]), {}, "adapter-shape", "r, in"),
    "flat": (change(A, lambda t: t.flatten()), {}, "adapter-shape", "do not belong together"),
    "empty": (change(B, lambda t: t[:0]), {}, "adapter-shape", "not empty"),
    "nan": (change(B, lambda t: t * float("nan")), {}, "not-finite", B),
    "inf": (change(A, lambda t: t + float("inf")), {}, "not-finite", A),
    "lost_rank_b": (zero_rows("lora_B", 4, 2), {}, "adapter-zero-blocks", "block 2 of 4"),
    "lost_rank_a": (zero_rows("lora_A", 2, 1), {}, "adapter-zero-blocks", "block 1 of 2"),
    "untrained": (untrain, {"fuse_lora": True}, "adapter-without-effect", "changed no weight"),
    "other_name": (lambda s: s, {"adapter_name": "new"}, "adapter-missing", "`default`, `old`"),
    "unrecorded": (lambda s: s, {"adapter_name": "old"}, "adapter-settings-missing", "another"),
    "kasa": (
        lambda s: {**s, f"{MODULE}.lora_diag.default": torch.ones(4)},
        {}, "adapter-unsupported", "lora_diag",
    ),
    "experts": (
        lambda s: {**s, "experts.base_layer.lora_A.default.weight": torch.ones(4, 4)},
        {}, "adapter-unsupported", "expert parameters",
    ),
    "lokr": (
        lambda s: {**s, f"{MODULE}.lokr_w1.default": torch.ones(4)},
        {}, "adapter-unsupported", "lokr_w1",
    ),
    "no_lora": (
        lambda s: {n.replace(".base_layer", ""): t for n, t in s.items() if "lora_" not in n},
        {"fuse_lora": True}, "adapter-missing", "no adapter at all",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_adapter_is_refused(lora: Path, tmp_path: Path, name: str) -> None:
    """Catches an adapter published though its tensors cannot be what was trained."""
    damage, options, error_id, words = DAMAGES[name]
    state = load_file(lora / "qwen" / "state.safetensors")
    folder = write(tmp_path / "actor", damage(state))
    text = refuse(folder, lora / "qwen", **options)
    assert error_id in text, text
    assert words in text, text


def test_zero_blocks_can_be_accepted(lora: Path, tmp_path: Path) -> None:
    """Catches a flag that does nothing, and an acceptance that is not recorded."""
    state = load_file(lora / "qwen" / "state.safetensors")
    folder = write(tmp_path / "actor", zero_rows("lora_B", 4, 2)(state))
    source = lora / "qwen" / "full" / "huggingface" / "config.json"
    (folder / "huggingface" / "config.json").write_bytes(source.read_bytes())
    result = merge(
        folder, tmp_path / "out", base_model=lora / "qwen" / "base", allow_suspicious_zeros=True
    )
    assert any("accepted: block 2 of 4" in note for note in result.notes)


META = {"r": 4, "lora_alpha": 6}
SETTINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({"lora_train_meta": None}, "adapter-settings-missing", "--lora-config"),
    "alpha_zero": (
        {"lora_train_meta": {"r": 4, "lora_alpha": 0}}, "adapter-settings-invalid", "alpha 0",
    ),
    "alpha_text": (
        {"lora_train_meta": {"r": 4, "lora_alpha": "6"}}, "adapter-settings-invalid", "'6'",
    ),
    "no_alpha": ({"lora_train_meta": {"r": 4}}, "adapter-settings-invalid", "None"),
    "r_zero": (
        {"lora_train_meta": {"r": 0, "lora_alpha": 6}}, "adapter-settings-invalid", "r 0",
    ),
    "other_rank": (
        {"lora_train_meta": {"r": 8, "lora_alpha": 6}}, "adapter-settings-contradict", "r 8",
    ),
    "contradiction": (
        {"adapter_config": {**FULL, "lora_alpha": 8}}, "adapter-settings-contradict",
        "lora_train_meta.json",
    ),
    "other_method": ({"adapter_config": {**FULL, "peft_type": "LOKR"}}, "adapter-unsupported",
                     "LOKR"),
    "other_option": (
        {"adapter_config": {**FULL, "target_parameters": ["experts.w"]}}, "adapter-unsupported",
        "target_parameters",
    ),
    "dora_missing": (
        {"adapter_config": {**FULL, "use_dora": True}}, "adapter-incomplete", "DoRA",
    ),
    "modules_missing": (
        {"adapter_config": {**FULL, "modules_to_save": ["proj_out"]}}, "adapter-incomplete",
        "proj_out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_uncertain_strength_is_refused(lora: Path, tmp_path: Path, name: str) -> None:
    """Catches a guessed strength: alpha 0, alpha = r, one of two contradicting records."""
    files, error_id, words = SETTINGS[name]
    state = load_file(lora / "qwen" / "state.safetensors")
    text = refuse(write(tmp_path / "actor", state, **files), lora / "qwen", fuse_lora=True)
    assert error_id in text, text
    assert words in text, text


@pytest.mark.parametrize("case", ["pissa", "olora", "modules_to_save", "bias_all"])
@pytest.mark.parametrize("fuse", [True, False])
def test_factors_that_are_not_all_are_refused(
    lora: Path,
    tmp_path: Path,
    case: str,
    fuse: bool,
) -> None:
    """Catches factors published for a base that the initialisation or the training changed."""
    state = load_file(lora / case / "state.safetensors")
    only = {name: tensor for name, tensor in state.items() if "lora_" in name}
    text = refuse(
        write(tmp_path / "actor", only),
        lora / case,
        fuse_lora=fuse,
        lora_config=lora / case / "config",
    )
    wanted = "adapter-changes-base" if case in ("pissa", "olora") else "adapter-incomplete"
    assert wanted in text, text


def test_lora_config_that_is_missing_is_named(lora: Path, tmp_path: Path) -> None:
    """Catches a typo that falls back to another record."""
    state = load_file(lora / "qwen" / "state.safetensors")
    text = refuse(
        write(tmp_path / "actor", state), lora / "qwen", lora_config=tmp_path / "nothing.json"
    )
    assert "adapter-settings-missing" in text
    assert "nothing.json" in text


def test_convolution_with_groups_is_refused(lora: Path, tmp_path: Path) -> None:
    """Catches a delta of a grouped convolution, which PEFT itself cannot make."""
    state = load_file(lora / "conv2d" / "state.safetensors")
    key = "pos_embed.proj.lora_A.default.weight"
    state[key] = torch.cat([state[key], state[key]], dim=1)
    text = refuse(write(tmp_path / "actor", state), lora / "conv2d", fuse_lora=True)
    assert "adapter-unsupported" in text
    assert "groups" in text


def test_adapter_alone_on_a_native_base_is_refused(
    lora: Path,
    base_dir: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Catches Diffusers factors added to rearranged rows."""
    state = load_file(lora / "minimax_h3" / "state.safetensors")
    only = {name: tensor for name, tensor in state.items() if "lora_" in name}
    text = refuse(
        write(tmp_path / "actor", only), lora / "minimax_h3", base_model=base_dir,
        output_format="pipeline", fuse_lora=True,
    )  # fmt: skip
    assert "format-unsupported" in text
    assert "native" in text


def test_adapter_of_another_base_is_refused(lora: Path, tmp_path: Path) -> None:
    """Catches an adapter exported for a base whose weights it does not fit."""
    state = load_file(lora / "qwen" / "state.safetensors")
    only = {name: tensor for name, tensor in state.items() if "lora_" in name}
    text = refuse(write(tmp_path / "actor", only), lora / "flux")
    assert "adapter-incomplete" in text or "class-mismatch" in text


def test_frozen_weights_of_another_base_are_said(lora: Path, tmp_path: Path) -> None:
    """Catches silence about a checkpoint whose frozen weights are not the base's."""
    state = load_file(lora / "qwen" / "state.safetensors")
    other = {n: t if "lora_" in n else t * 1.5 for n, t in state.items()}
    folder = write(tmp_path / "actor", other)
    source = lora / "qwen" / "full" / "huggingface" / "config.json"
    (folder / "huggingface" / "config.json").write_bytes(source.read_bytes())
    base = lora / "qwen" / "base"
    result = merge(folder, tmp_path / "out", base_model=base, fuse_lora=True)
    assert any("another base" in note for note in result.notes)
    result = merge(lora / "qwen" / "full", tmp_path / "good", fuse_lora=True)
    assert not any("another base" in note for note in result.notes)
