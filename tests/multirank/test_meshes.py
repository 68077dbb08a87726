"""What eight real ranks saved, on all sorts of meshes and by every engine, merged by 1 to 4."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dist_merge.errors import SourceError
from dist_merge.plan_sources import make_source_tensors
from dist_merge.records import DTYPES
from dist_merge.sources.rank_files import RankFileSource
from tests.helpers.launch import python, torchrun
from tests.helpers.write_meshes import NUM_CASES

Stored = dict[str, tuple[str, list[int], bytes]]


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything, written in one start of eight ranks."""
    out = tmp_path_factory.mktemp("meshes")
    done = torchrun("tests.helpers.write_meshes", ["--out", out], nproc=8, timeout=300)
    assert done.code == 0, done.stderr[-5000:]
    return out


def read_stored(paths: Iterable[Path]) -> Stored:
    """Dtype, shape and bytes of every tensor; also of dtypes that the library cannot give back."""
    stored: Stored = {}
    for path in paths:
        content = path.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        for name, entry in json.loads(content[8 : 8 + size]).items():
            if name != "__metadata__":
                start, end = (8 + size + offset for offset in entry["data_offsets"])
                stored[name] = (entry["dtype"], entry["shape"], content[start:end])
    return stored


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_everything_equals_what_the_run_held(meshes: Path, tmp_path: Path, nproc: int) -> None:
    """Catches any wrong offset, order, piece, dtype or byte, for any number of merging ranks."""
    module, arguments = "tests.helpers.merge_state", [meshes, tmp_path, "mesh"]
    done = torchrun(module, arguments, nproc=nproc) if nproc > 1 else python(module, arguments)
    assert done.code == 0, done.stderr
    expected = read_stored([meshes / "reference.safetensors"])
    found = read_stored(sorted((tmp_path / "mesh").glob("*.safetensors")))
    assert set(found) == set(expected)
    assert [name for name in expected if found[name] != expected[name]] == []


def test_cases_hold_what_they_should(meshes: Path) -> None:
    """Catches a writer that no longer makes the hard cases."""
    expected = read_stored([meshes / "reference.safetensors"])
    assert {dtype for dtype, _, _ in expected.values()} == {name for name, _ in DTYPES.values()}
    cases = [shape for name, (_, shape, _) in expected.items() if name.startswith("cases.")]
    assert len(cases) == NUM_CASES
    assert {len(shape) for shape in cases} == {0, 1, 2, 3, 4}
    assert any(0 in shape for shape in cases)
    source, folder = RankFileSource(), meshes / "mesh" / "actor"
    reader = source.open(folder, source.find_files(folder))
    shards = reader.describe(0)
    pieces: dict[tuple[str, str], int] = {}
    for shard in shards:
        pieces[shard.source_file, shard.fqn] = pieces.get((shard.source_file, shard.fqn), 0) + 1
    assert sum(count > 1 for count in pieces.values()) > 50, "pieces that lie in several places"
    notes: list[str] = []
    tensors = make_source_tensors(shards, world_size=8, notes=notes)
    assert [note for note in notes if "views.on_some_ranks" in note], "copies some ranks lack"
    assert any("removed wrapper names" in note for note in reader.notes())
    for engine in ("hsdp", "hsdp_tp", "fsdp1_hybrid"):
        assert all(box.replicas for box in tensors[f"{engine}.0.up.weight"].boxes), engine


def test_trained_models_moved(meshes: Path) -> None:
    """Catches checkpoints that were saved without a step: every weight must have changed."""
    reference = load_file_without_odd_dtypes(meshes / "reference.safetensors")
    assert not torch.equal(reference["fsdp2.0.norm.weight"], torch.ones(12))
    # FSDP1 with and without a mesh, sharded or replicated, is one arithmetic.
    for name in ("up.weight", "up.bias", "down.weight", "norm.weight"):
        first = reference[f"fsdp1_sharded.0.{name}"]
        assert torch.equal(first, reference[f"fsdp1_mesh.0.{name}"])
        assert torch.allclose(first, reference[f"fsdp2.0.{name}"], atol=1e-3)


def load_file_without_odd_dtypes(path: Path) -> dict[str, torch.Tensor]:
    """The fp32 tensors of a file."""
    return {
        name: torch.frombuffer(bytearray(content), dtype=torch.float32).view(shape)
        for name, (dtype, shape, content) in read_stored([path]).items()
        if dtype == "F32" and content
    }


def open_folder(folder: Path, **options: str) -> None:
    source = RankFileSource(**options)
    source.open(folder, source.find_files(folder)).describe(0)


@pytest.mark.parametrize(
    ("layout", "error_id", "parts"),
    [
        ("flat", "flat-parameter", ("`_flat_param`", "SHARDED_STATE_DICT")),
        ("descending", "mesh-order", ("ranks [7, 6, 5, 4, 3, 2, 1, 0]", "tensor `weight`")),
        ("old/tp", "shard-order-ambiguous", ("--assume-shard-order right-to-left", "2 mesh axes")),
    ],
)
def test_what_cannot_be_known_is_refused(
    meshes: Path, layout: str, error_id: str, parts: tuple[str, ...]
) -> None:
    """Catches a guess about files that do not tell enough."""
    with pytest.raises(SourceError) as caught:
        open_folder(meshes / layout / "actor")
    assert caught.value.error_id == error_id
    for part in parts:
        assert part in str(caught.value)


def test_stated_shard_order_is_used(meshes: Path, tmp_path: Path) -> None:
    """Catches an option that does not reach the source, and an order that is turned around."""
    for order in ("right-to-left", "left-to-right"):
        (tmp_path / order).mkdir()
        arguments = [meshes / "old", tmp_path / order, "tp", f"assume_shard_order={order}"]
        done = python("tests.helpers.merge_state", arguments)
        assert done.code == 0, done.stderr
    expected = load_file(meshes / "old" / "reference.safetensors")["weight"]
    right = load_file(next((tmp_path / "right-to-left").rglob("*.safetensors")))["weight"]
    left = load_file(next((tmp_path / "left-to-right").rglob("*.safetensors")))["weight"]
    assert torch.equal(right, expected)
    assert torch.equal(left[:2], expected[:2])
    assert torch.equal(left[2:4], expected[8:10])
