"""Input made to do harm: nothing of it is run, nothing outside is read, nothing hangs."""

from __future__ import annotations

import os
import pickle
import socket
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_merge import MergeError, ModelMergerConfig, merge_model, validate_artifact
from dist_merge.sources.rank_files import RankFileSource
from tests.conftest import Lab
from tests.unit.test_published import make_published

NAME = "model_world_size_1_rank_0.pt"
SHARDED = b"torch.distributed._shard.sharded_tensor.api\nShardedTensor\n"


class Payload:
    """Makes a folder when a pickle runs it."""

    def __init__(self, path: str, how: Any = os.mkdir) -> None:
        self.path, self.how = path, how

    def __reduce__(self) -> Any:
        return (self.how, (self.path,))


def write_archive(path: Path, program: bytes, **more: bytes) -> None:
    """An archive as torch writes it, with any pickle program."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", bytes(64))
        for name, content in more.items():
            archive.writestr(name, content)


def read(folder: Path) -> None:
    """What a merge does with a rank file before it moves a byte."""
    source = RankFileSource()
    reader = source.open(folder, source.find_files(folder))
    for shard in reader.describe(0):
        reader.read(shard.source_file, shard.source_key)


PROGRAMS = [
    b"cos\nmkdir\n(VTRAP\ntR.",
    b"cposix\nmkdir\n(VTRAP\ntR.",
    b"cbuiltins\neval\n(V__import__('os').mkdir('TRAP')\ntR.",
    b"cbuiltins\nexec\n(V__import__('os').mkdir('TRAP')\ntR.",
    b"cbuiltins\ngetattr\n(cos\n__dict__\nVmkdir\ntR(VTRAP\ntR.",
    # `getattr` is answered by a stand-in where a ShardedTensor is in the file, for one name only.
    b"cbuiltins\ngetattr\n(c" + SHARDED + b"V__init__\ntR.",
    b"cbuiltins\ngetattr\n(c" + SHARDED + b"V__subclasses__\ntR(tR.",
    b"c" + SHARDED + b"(VTRAP\ntR.",
    b"ctorch.serialization\nload\n(VTRAP\ntR.",
    b"ctorch.hub\nload\n(VTRAP\ntR.",
    b"ctorch\nload\n(VTRAP\ntR.",
    b"ctorch._utils\n_import_dotted_name\n(Vos.mkdir\ntR(VTRAP\ntR.",
    b"ctorch.nn.modules.module\nModule\n)\x81.",
    b"ctorch.distributed.tensor._dtensor_spec\nDTensorSpec\n(VTRAP\ntR.",
    b"ctorch._utils\n_rebuild_tensor_v2\n(VTRAP\ntR.",
    b"ctorch\nDevice.__class__\n(VTRAP\ntR.",
    b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93(VTRAP\ntR.",
    b"(iposix\nmkdir\n.",
    b"\x80\x02\x82\x01.",
    b"Vtext\nQ.",
    b"}Va\ncos\nmkdir\n(VTRAP\ntRs.",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_pickle_program_is_not_run(tmp_path: Path, program: bytes) -> None:
    """Catches a global that is called, by whatever opcode or detour."""
    trap = tmp_path / "trap"
    write_archive(tmp_path / NAME, program.replace(b"TRAP", str(trap).encode()))
    with pytest.raises(MergeError):
        read(tmp_path)
    assert not trap.exists()


def hide(how: str, payload: Payload) -> Any:
    """A state dict with a payload somewhere inside."""
    tensor = torch.ones(2)
    if how == "attribute":
        tensor = torch.nn.Parameter(tensor)
        tensor.note = payload  # type: ignore[attr-defined]
        return {"a": tensor}
    if how == "key":
        return {"a": tensor, (1, payload): tensor}
    if how == "ordered":
        return OrderedDict(a=tensor, b=OrderedDict(c=[{"d": payload}]))
    return {"a": tensor, "b": payload if how == "value" else [payload]}


@pytest.mark.parametrize("how", ["value", "list", "ordered", "attribute", "key"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_hidden_payload_is_not_run(tmp_path: Path, how: str, is_zip: bool) -> None:
    """Catches a payload that is reached only after honest tensors, in both formats of torch."""
    trap = tmp_path / "trap"
    torch.save(
        hide(how, Payload(str(trap))), tmp_path / NAME, _use_new_zipfile_serialization=is_zip
    )
    with pytest.raises(MergeError):
        read(tmp_path)
    assert not trap.exists()


def add_second_program(path: Path, trap: Path) -> None:
    """Two programs of one name: one is looked at, the other run?"""
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Payload(str(trap)), protocol=2))


def add_outside_name(path: Path, trap: Path) -> None:
    """A member that unpacks to somewhere else."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../trap", b"x")
        archive.writestr(str(trap), b"x")


def add_other_program(path: Path, trap: Path) -> None:
    """A program where TorchScript has its own."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/constants.pkl", pickle.dumps(Payload(str(trap)), protocol=2))


@pytest.mark.parametrize("spoil", [add_second_program, add_outside_name, add_other_program])
def test_archive_with_odd_members(tmp_path: Path, spoil: Callable[[Path, Path], None]) -> None:
    """Catches members that are unpacked, or run instead of the one that was looked at."""
    folder, trap = tmp_path / "actor", tmp_path / "trap"
    folder.mkdir()
    # The program of an empty state dict, so that it can be read where nothing is refused.
    write_archive(folder / NAME, b"}.")
    spoil(folder / NAME, trap)
    try:
        read(folder)
    except MergeError as error:
        assert error.error_id in ("unsafe-pickle", "unreadable-file"), error  # noqa: PT017
    assert not trap.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["actor"]


@pytest.mark.parametrize("field", [20, 24, 42])
def test_archive_with_sizes_beyond_the_file(tmp_path: Path, field: int) -> None:
    """Catches a size or offset in the archive's directory that is believed."""
    torch.save({"a": torch.ones(16)}, tmp_path / NAME)
    content = bytearray((tmp_path / NAME).read_bytes())
    position = content.index(b"PK\x01\x02")
    while position >= 0:
        content[position + field : position + field + 4] = (2**31 - 1).to_bytes(4, "little")
        position = content.find(b"PK\x01\x02", position + 4)
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(MergeError):
        read(tmp_path)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(path.parent, os.O_RDONLY)
        os.chdir(here)  # the paths of sockets are short
        os.close(here)
        server.bind(path.name)


def make_device_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


SPECIALS = [make_pipe, make_socket, make_device_link]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", SPECIALS)
@pytest.mark.parametrize(
    "place",
    [
        "base/vae/config.json",
        "base/vae/extra",
        "base/model_index.json",
        "base/transformer/diffusion_pytorch_model.safetensors",
        "actor/model_world_size_2_rank_1.pt",
        "actor/huggingface/config.json",
    ],
)
def test_special_file_in_an_input(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, make: Any
) -> None:
    """Catches a read that waits for ever, or never ends."""
    monkeypatch.chdir(tmp_path)
    lab.copy_actor(tmp_path / "actor")
    lab.copy_base(tmp_path / "base")
    path = tmp_path / place
    path.unlink(missing_ok=True)
    make(path)
    monkeypatch.chdir(tmp_path)
    config = ModelMergerConfig(
        local_dir=tmp_path / "actor",
        base_model=tmp_path / "base",
        target_dir=tmp_path / "out",
        trust_checkpoint=True,
        quiet=True,
    )
    with pytest.raises(MergeError):
        merge_model(config)
    assert sorted(os.listdir(tmp_path)) == ["actor", "base"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", SPECIALS)
@pytest.mark.parametrize("name", ["extra", "config.json", "merge_manifest.json"])
def test_special_file_in_a_published_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Any
) -> None:
    """Catches a recheck that opens what is no file."""
    monkeypatch.chdir(tmp_path)
    folder = make_published(tmp_path / "out")
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(MergeError):
        validate_artifact(folder)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31mb", "a\\b", "\udcff", "a\u202eb"])
def test_odd_names_in_a_base(lab: Lab, tmp_path: Path, name: str) -> None:
    """Catches names that would not survive a copy, or that change what a terminal shows."""
    base = lab.copy_base(tmp_path / "base")
    (base / "vae" / name).write_text("x")
    config = ModelMergerConfig(
        local_dir=lab.run() / "actor",
        base_model=base,
        target_dir=tmp_path / "out",
        trust_checkpoint=True,
        quiet=True,
    )
    with pytest.raises(MergeError, match="bad-entry") as caught:
        merge_model(config)
    assert name not in str(caught.value)
    assert os.listdir(tmp_path) == ["base"]


def test_deep_folders(tmp_path: Path) -> None:
    """Catches a walk that runs out of stack."""
    folder = make_published(tmp_path / "out")
    here = os.open(folder, os.O_RDONLY)
    for _ in range(200):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(MergeError):
        validate_artifact(folder)
