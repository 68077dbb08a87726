"""Rank files one by one: what is refused with which words, keys, options, checksums."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_merge.cli import make_parser
from dist_merge.errors import RequestError, SourceError
from dist_merge.inspect_sources import choose_source
from dist_merge.plan_sources import make_source_tensors
from dist_merge.records import SourceTensor
from dist_merge.request import ModelMergerConfig
from dist_merge.sources.keys import clean_key
from dist_merge.sources.rank_files import RankFileReader, RankFileSource
from dist_merge.sources.sharded_tensor import look_up

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "torch-versions"
State = dict[str, Any]


def name_file(rank: int, world_size: int = 2) -> str:
    return f"model_world_size_{world_size}_rank_{rank}.pt"


def copy_fixture(folder: Path, name: str) -> Path:
    """A copy of a fixture that a test may spoil."""
    folder.mkdir(exist_ok=True)
    for path in (FIXTURES / name).glob("*.pt"):
        shutil.copyfile(path, folder / path.name)
    return folder


def edit(path: Path, change: Callable[[State], Any]) -> None:
    """Load a rank file as torch does, change it and save it again."""
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def open_reader(folder: Path, **options: Any) -> RankFileReader:
    source = RankFileSource(**options)
    files = source.find_files(folder)
    source.check_complete([file.path for file in files])
    return source.open(folder, files)


def read_tensors(folder: Path, notes: list[str] | None = None) -> dict[str, SourceTensor]:
    shards = open_reader(folder).describe(0)
    world_size = len(list(folder.glob("*.pt")))
    return make_source_tensors(shards, world_size=world_size, notes=[] if notes is None else notes)


def refuse(folder: Path, **options: Any) -> SourceError:
    """The error that reading and planning a folder gives."""
    with pytest.raises(SourceError) as caught:
        make_source_tensors(open_reader(folder, **options).describe(0), world_size=2, notes=[])
    return caught.value


def cut_local(state: State) -> None:
    state["0.weight"]._local_tensor = state["0.weight"]._local_tensor[:-1]


def claim_more(state: State) -> None:
    """Say that the tensor has 6 rows; the locals have 5."""
    value = state["0.weight"]
    meta = value._spec.tensor_meta._replace(shape=torch.Size([6, 3]))
    value._spec.tensor_meta = meta
    state["0.weight"] = torch.distributed.tensor.DTensor(
        value._local_tensor, value._spec, requires_grad=False
    )


def other_dtype(state: State) -> None:
    state["0.weight"]._local_tensor = state["0.weight"]._local_tensor.double()


def move_on_mesh(state: State) -> None:
    state["0.weight"]._spec.mesh._coordinate_on_dim = (0,)


def no_mesh(state: State) -> None:
    del state["0.weight"]._spec.mesh.__dict__["_layout"]


def partial(state: State) -> None:
    state["0.weight"]._spec.placements = (torch.distributed.tensor.Partial(),)


def shard_other_dim(state: State) -> None:
    value = state["0.weight"]
    value._spec.placements = (torch.distributed.tensor.Shard(2),)


@pytest.mark.parametrize(
    ("change", "error_id", "parts"),
    [
        (cut_local, "local-shard-size", ("expected: [2, 3]; found: [1, 3]", "`0.weight`")),
        (claim_more, "local-shard-size", ("expected: [3, 3]; found: [2, 3]", name_file(1))),
        (other_dtype, "dtype-disagrees", ("expected: float32; found: float64",)),
        (move_on_mesh, "mesh-invalid", ("rank 1 does not stand at [0]",)),
        (no_mesh, "mesh-invalid", ("_layout", "`0.weight`")),
        (partial, "placement-partial", ("reduce the tensor before saving",)),
        (shard_other_dim, "mesh-invalid", ("sharded on dim 2, the tensor has 2 dims",)),
        (lambda s: s.pop("0.weight"), "local-shard-missing", ("6 of 15 elements are in no file",)),
        (lambda s: s.update({"0.weight": "text"}), "not-a-state-dict", ("found: str",)),
        (lambda s: s.update({"0.weight": torch.eye(3).to_sparse()}), "dtype-unknown", ("sparse",)),
        (
            lambda s: s.update({"0.weight": torch.zeros(2, dtype=torch.complex128)}),
            "dtype-unknown",
            ("complex128",),
        ),
        (
            lambda s: s.update({"module.0.weight": torch.zeros(2)}),
            "key-collision",
            ("`0.weight` and `module.0.weight`",),
        ),
        (lambda s: s.update({"0.weight": torch.zeros(5, 3)}), "local-shard-overlap", ("overlap",)),
        (lambda s: s.update({"buf": torch.zeros(4)}), "shape-disagrees", ("`buf`",)),
        (lambda s: s.update({"buf": s["buf"].double()}), "dtype-disagrees", ("`buf`",)),
        (
            lambda s: s.update({"0._flat_param": torch.zeros(4)}),
            "flat-parameter",
            ("SHARDED_STATE_DICT", "`0._flat_param`"),
        ),
    ],
)
def test_wrong_claims_are_refused(
    tmp_path: Path, change: Callable[[State], Any], error_id: str, parts: tuple[str, ...]
) -> None:
    """Catches a file that says one thing and holds another."""
    folder = copy_fixture(tmp_path / "actor", "2.13_fsdp")
    edit(folder / name_file(1), change)
    error = refuse(folder)
    assert error.error_id == error_id
    for part in parts:
        assert part in str(error)
    assert name_file(1) in str(error) or error_id == "local-shard-missing"


@pytest.mark.parametrize(
    "name", ["2.4.1_fsdp", "2.6.0_fsdp", "2.9.1_fsdp", "2.10.0_fsdp", "2.14.1_fsdp"]
)
def test_swapped_names_are_noticed_for_every_release(tmp_path: Path, name: str) -> None:
    """Catches files that were renamed, which would swap the halves of every tensor."""
    folder = copy_fixture(tmp_path / "actor", name)
    (folder / name_file(0)).rename(folder / "x")
    (folder / name_file(1)).rename(folder / name_file(0))
    (folder / "x").rename(folder / name_file(1))
    error = refuse(folder)
    assert error.error_id == "rank-mismatch"
    assert "expected: rank 0; found: rank 1" in str(error)


@pytest.mark.parametrize("name", ["2.6.0_sub", "2.10.0_sub", "2.13_sub"])
def test_swapped_names_of_a_sliced_mesh_are_noticed(tmp_path: Path, name: str) -> None:
    """Catches a rank that is taken from the slice, where two files have the same coordinate."""
    folder = copy_fixture(tmp_path / "actor", name)
    (folder / name_file(0, 4)).rename(folder / "x")
    (folder / name_file(1, 4)).rename(folder / name_file(0, 4))
    (folder / "x").rename(folder / name_file(1, 4))
    assert refuse(folder).error_id == "rank-mismatch"


def test_swapped_names_of_sharded_tensors_are_noticed(tmp_path: Path) -> None:
    """Catches FSDP1 files that were renamed."""
    folder = copy_fixture(tmp_path / "actor", "fsdp1_sharded_tensor")
    shutil.copyfile(folder / name_file(0), folder / name_file(1))
    error = refuse(folder)
    assert error.error_id == "rank-mismatch"
    assert "expected: rank 1; found: rank 0" in str(error)


@pytest.mark.parametrize(
    ("old", "new", "error_id"),
    [
        (b"shard_offsets", b"shard_0ffsets", "sharded-tensor-invalid"),
        (b"shards_metadata", b"shards_metadato", "sharded-tensor-invalid"),
        (
            b"X\x11\x00\x00\x00ProcessGroupState",
            b"X\x11\x00\x00\x00__init_subclass__",
            "unsafe-pickle",
        ),
        (b"c__builtin__\ngetattr\n", b"c__builtin__\nexecfil\n", "unsafe-pickle"),
    ],
)
def test_spoiled_sharded_tensors_are_refused(
    tmp_path: Path, old: bytes, new: bytes, error_id: str
) -> None:
    """Catches a stand-in that answers more than it must, and a crash on another structure."""
    folder = copy_fixture(tmp_path / "actor", "fsdp1_sharded_tensor")
    path = folder / name_file(1)
    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("data.pkl"))
        content = archive.read(name)
    assert old in content
    whole = path.read_bytes()
    path.write_bytes(whole.replace(content, content.replace(old, new)))
    assert refuse(folder).error_id == error_id


def test_stand_in_for_getattr_answers_one_question() -> None:
    """Catches a look-up that a hostile file could use."""
    for owner, name in ((torch, "load"), (object, "__subclasses__"), (nn.Module, "forward")):
        with pytest.raises(pickle.UnpicklingError, match="look-up"):
            look_up(owner, name)


def test_stand_ins_are_allowed_only_while_a_file_is_read() -> None:
    """Catches an allowance that stays in the process."""
    before = set(map(str, torch.serialization.get_safe_globals()))
    open_reader(FIXTURES / "fsdp1_sharded_tensor").describe(0)
    assert set(map(str, torch.serialization.get_safe_globals())) == before


def test_sharded_tensor_with_one_owner_has_one_box() -> None:
    """Catches an error about the rank that owns nothing and so lists no shard."""
    tensors = read_tensors(FIXTURES / "fsdp1_sharded_tensor")
    assert tensors["blocks.0.one.weight"].spec.shape == (1, 4)
    assert len(tensors["blocks.0.one.weight"].boxes) == 1


@pytest.mark.parametrize(
    ("key", "fqn"),
    [
        ("blocks.0.weight", "blocks.0.weight"),
        ("_orig_mod.blocks.0._fsdp_wrapped_module.weight", "blocks.0.weight"),
        ("module._orig_mod.blocks.0._checkpoint_wrapped_module.weight", "blocks.0.weight"),
        ("_fsdp_wrapped_module.module.blocks.0.weight", "blocks.0.weight"),
        ("base_model.model.blocks.0.weight", "blocks.0.weight"),
        ("module.base_model.model.blocks.0.weight", "blocks.0.weight"),
        ("base_model.model.module.blocks.0.weight", "blocks.0.weight"),
        ("module.module.blocks.0.weight", "blocks.0.weight"),
        ("blocks.module.weight", "blocks.module.weight"),
        ("blocks.base_model.model.weight", "blocks.base_model.model.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("module", "module"),
        ("base_model.model", "base_model.model"),
        ("_orig_mod", "_orig_mod"),
    ],
)
def test_wrapper_names_are_removed_whole(key: str, fqn: str) -> None:
    """Catches a wrapper left in, and a real name that is cut."""
    assert clean_key(key) == fqn


def test_plain_tensor_on_one_rank_is_reported(tmp_path: Path) -> None:
    """Catches a silent copy that only one rank vouches for."""
    folder = copy_fixture(tmp_path / "actor", "2.13_fsdp")
    edit(folder / name_file(1), lambda state: state.pop("buf"))
    notes: list[str] = []
    assert read_tensors(folder, notes)["buf"].spec.shape == (3,)
    assert notes == ["`buf` is a plain tensor found in 1 of 2 files"]


def test_parameters_and_views_read_by_their_own_strides(tmp_path: Path) -> None:
    """Catches a read of the storage where a view of it was saved."""
    storage = torch.arange(100.0)
    state = {
        "view": storage[7:11],
        "turned": storage[20:32].view(3, 4).t(),
        "parameter": nn.Parameter(storage[50:52]),
        "scalar": storage[99],
        "empty": storage[5:5],
    }
    torch.save(state, tmp_path / name_file(0, 1))
    reader = open_reader(tmp_path)
    shards = {shard.fqn: shard for shard in reader.describe(0)}
    for name, value in state.items():
        data = reader.read(shards[name].source_file, shards[name].source_key)
        assert torch.equal(data, value.detach()), name
        assert shards[name].sizes == tuple(value.shape)
        assert not data.requires_grad


@pytest.mark.parametrize("keep", [0, 10, 0.5, -1, -200])
def test_cut_files_are_refused(tmp_path: Path, keep: float) -> None:
    """Catches a file of an interrupted save."""
    folder = copy_fixture(tmp_path / "actor", "2.13_fsdp")
    path = folder / name_file(1)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)] if 0 < keep < 1 else content[: int(keep)])
    for options in ({}, {"check_crc": True}):
        error = refuse(folder, **options)
        assert error.error_id == "unreadable-file"
        assert name_file(1) in str(error)


def flip(path: Path, member: str) -> None:
    """Change one bit in the payload of a member."""
    with zipfile.ZipFile(path) as archive:
        (info,) = (m for m in archive.infolist() if m.filename.endswith(member))
        with archive.open(info) as stream:
            content = stream.read()
    whole = bytearray(path.read_bytes())
    start = info.header_offset + 30
    start += int.from_bytes(whole[start - 4 : start - 2], "little")
    start += int.from_bytes(whole[info.header_offset + 28 : info.header_offset + 30], "little")
    assert whole[start : start + len(content)] == content
    whole[start + 2] ^= 1
    path.write_bytes(bytes(whole))


def test_flipped_bit_is_found_only_with_check_crc(tmp_path: Path) -> None:
    """Catches an option that checks nothing."""
    folder = copy_fixture(tmp_path / "actor", "2.13_fsdp")
    open_reader(folder, check_crc=True).describe(0)
    flip(folder / name_file(1), "data/0")
    open_reader(folder).describe(0)
    error = refuse(folder, check_crc=True)
    assert error.error_id == "crc-mismatch"
    assert "data/0" in str(error)
    assert name_file(1) in str(error)


def test_files_without_checksums_cannot_be_checked(tmp_path: Path) -> None:
    """Catches a check that passes since there is nothing to compare with."""
    compute = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(4)}, tmp_path / name_file(0, 1))
    finally:
        torch.serialization.set_crc32_options(compute)
    open_reader(tmp_path).describe(0)
    assert refuse(tmp_path, check_crc=True).error_id == "crc-absent"


def test_options_reach_the_source() -> None:
    """Catches an option that the command line takes and nobody reads."""
    words = ["merge", "--local_dir", "a", "--target_dir", "b", "--base_model", "c"]
    words += ["--trust-checkpoint", "--check-crc", "--assume-shard-order", "right-to-left"]
    config = ModelMergerConfig(**vars(make_parser().parse_args(words)))
    source = choose_source(config, "fsdp")
    assert isinstance(source, RankFileSource)
    assert (source.check_crc, source.assume_shard_order) == (True, "right-to-left")
    with pytest.raises(RequestError, match="bad-option") as caught:
        choose_source(config, "dcp")
    assert "`check_crc` is for rank files" in str(caught.value)
    with pytest.raises(RequestError, match="bad-option"):
        ModelMergerConfig(local_dir="a", target_dir="b", assume_shard_order="backwards")
