"""Rank files written by torch 2.4 to 2.14, opened by the installed one without a process group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dist_merge.plan_sources import make_source_tensors
from dist_merge.sources import SOURCES
from dist_merge.sources.unpickle import load_rank_file

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


def test_files_of_fsdp1_need_no_process_group() -> None:
    """Catches wrong offsets of a ShardedTensor, and a class that asks for the writer's group."""
    source = SOURCES["fsdp"]
    folder = FIXTURES / "fsdp1_sharded_tensor"
    files = source.find_files(folder)
    reader = source.open(folder, files)
    tensors = make_source_tensors(reader.describe(0), world_size=2, notes=[])
    assert tensors["blocks.0.lin.weight"].spec.shape == (5, 3)
    assert [box.offsets for box in tensors["blocks.0.lin.weight"].boxes] == [(0, 0), (3, 0)]
    assert [box.sizes for box in tensors["scale"].boxes] == [(4,), (3,)]
    # The same model, seed and split were saved from FSDP2 for the device fixtures.
    loaded = load_rank_file(FIXTURES / "devices" / "cuda.pt").state
    for name in ("blocks.0.lin.weight", "blocks.0.lin.bias", "scale"):
        box = tensors[name].boxes[1]
        piece = reader.read(box.source_file, box.source_key)
        assert torch.equal(piece, loaded[name]._local_tensor), name


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_files_from_other_devices_open_on_the_cpu(tmp_path: Path, device: str) -> None:
    """Catches a file that needs the device or the plugin of the run that wrote it."""
    name = "model_world_size_2_rank_1.pt"
    (tmp_path / name).write_bytes((FIXTURES / "devices" / f"{device}.pt").read_bytes())
    source = SOURCES["fsdp"]
    reader = source.open(tmp_path, source.find_files(tmp_path))
    shards = {shard.fqn: shard for shard in reader.describe(0)}
    assert shards["blocks.0.lin.weight"].offsets == (3, 0)
    data = reader.read(name, "blocks.0.lin.weight")
    assert data.device.type == "cpu"
    assert data.shape == (2, 3)
    assert data[0, 0].item() == pytest.approx(0.1528, abs=1e-4)
