"""Rank files written by torch 2.4 to 2.14, opened by the installed one without a process group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dist_merge.errors import SourceError
from dist_merge.plan import make_source_tensors
from dist_merge.sources import SOURCES

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "torch-versions"
FOLDERS = sorted(path.name for path in FIXTURES.glob("2.*"))


@pytest.mark.parametrize("name", FOLDERS)
def test_files_of_every_release_give_the_full_tensors(name: str) -> None:
    """Catches a mesh or placement layout of another release that is read wrongly."""
    source = SOURCES["fsdp"]
    files = source.find_files(FIXTURES / name)
    world_size = source.check_complete([file.path for file in files])
    reader = source.open(FIXTURES / name, files)
    tensors = make_source_tensors(reader.describe(0), world_size=world_size, notes=[])
    expected = load_file(FIXTURES / "expected.safetensors")
    assert set(tensors) == set(expected)
    for fqn, tensor in expected.items():
        full = torch.empty_like(tensor)
        for box in tensors[fqn].boxes:
            index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            full[index] = reader.read(box.source_file, box.source_key)
            for _, file, key in box.replicas:
                assert torch.equal(full[index], reader.read(file, key)), "replicas must be equal"
        assert torch.equal(full, tensor), fqn


def test_fsdp1_sharded_tensors_are_refused_clearly() -> None:
    """Catches a crash on, or code run from, files this version cannot read yet."""
    source = SOURCES["fsdp"]
    folder = FIXTURES / "fsdp1_sharded_tensor"
    with pytest.raises(SourceError, match="unsafe-pickle"):
        source.open(folder, source.find_files(folder))


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_files_from_other_devices_open_or_are_refused(tmp_path: Path, device: str) -> None:
    """Catches a file of a CUDA run that needs a GPU, and a crash on one of an NPU run."""
    name = "model_world_size_1_rank_0.pt"
    (tmp_path / name).write_bytes((FIXTURES / "devices" / f"{device}.pt").read_bytes())
    source = SOURCES["fsdp"]
    files = source.find_files(tmp_path)
    if device == "npu":
        with pytest.raises(SourceError, match="unreadable-file"):
            source.open(tmp_path, files)
    else:
        opened = source.open(tmp_path, files)
        assert opened._opened[name]  # type: ignore[attr-defined]
