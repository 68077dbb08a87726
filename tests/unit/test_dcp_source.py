"""One-process DCP saves: every kind of tensor torch can store, and pickles that are no data."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dist_merge.errors import SourceError
from dist_merge.sources.dcp import DcpReader, DcpSource
from dist_merge.sources.dcp_metadata import decode_metadata, encode_metadata, read_metadata
from dist_merge.sources.inert_pickle import load_inert, make_record
from dist_merge.sources.mapped import MappedFile
from dist_merge.sources.saved_tensor import find_tensor

STATE = {
    "weight": torch.randn(5, 3),
    "transposed": torch.randn(4, 6).t(),
    "part": torch.arange(40, dtype=torch.int32).view(8, 5)[2:5, 1:4],
    "half": torch.randn(3).half(),
    "brain": torch.randn(7, 1).bfloat16(),
    "eight": torch.randn(9).to(torch.float8_e4m3fn),
    "words": torch.tensor([1, 2, 65535], dtype=torch.uint16),
    "double": torch.randn(2, 2, 2, dtype=torch.float64),
    "complex": torch.randn(3, dtype=torch.complex64),
    "flags": torch.tensor([True, False]),
    "bytes": torch.arange(3, dtype=torch.uint8),
    "scalar": torch.tensor(7),
    "nothing": torch.empty(0, 4),
    "parameter": torch.nn.Parameter(torch.randn(2, 3)),
    "module._orig_mod.wrapped": torch.randn(2),
}


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save by one process, with entries that are no tensors."""
    folder = tmp_path_factory.mktemp("save")
    dcp.save({"model": STATE, "step": 3, "name": "x"}, checkpoint_id=folder, no_dist=True)
    return folder


def open_save(folder: Path) -> DcpReader:
    """A reader as one rank makes it."""
    source = DcpSource()
    files = source.find_files(folder)
    bound = source.with_index([source.read_index(folder, files)], state_key=None)
    bound.check_complete([file.path for file in files])
    return bound.open(folder, files)


def test_save_every_tensor_read_bit_by_bit(save: Path) -> None:
    """Catches a dtype, a stride, an offset or an alignment that is read wrongly."""
    reader = open_save(save)
    shards = {shard.fqn: shard for shard in reader.describe(4)}
    assert set(shards) == {name.replace("module._orig_mod.", "") for name in STATE}
    for name, tensor in STATE.items():
        shard = shards[name.replace("module._orig_mod.", "")]
        found = reader.read(shard.source_file, shard.source_key)
        assert found.dtype == tensor.dtype, name
        assert torch.equal(
            found.contiguous().reshape(-1).view(torch.uint8),
            tensor.detach().contiguous().reshape(-1).view(torch.uint8),
        ), name
        assert found.shape == tensor.shape == shard.sizes == shard.global_shape
        assert not found.requires_grad
        assert found.data_ptr() % found.element_size() == 0
        assert shard.holder == 4
    notes = " ".join(reader.notes())
    assert "removed wrapper names" in notes
    assert "2 entries that are no tensors" in notes


def test_metadata_agrees_with_torch_and_travels(save: Path) -> None:
    """Catches stand-ins that read other numbers than torch's own classes."""
    ours = read_metadata(save / ".metadata")
    theirs = dcp.FileSystemReader(save).read_metadata()
    assert {t.key for t in ours.tensors} == {f"model.{name}" for name in STATE}
    assert set(ours.other_keys) == {"step", "name"}
    for tensor in ours.tensors:
        entry = theirs.state_dict_metadata[tensor.key]
        assert torch.Size(tensor.shape) == entry.size
        assert getattr(torch, tensor.dtype) == entry.properties.dtype
        assert tensor.path == theirs.planner_data[tensor.key]
    assert decode_metadata(encode_metadata(ours)) == ours


class Payload:
    """Makes a folder when a pickle runs it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (eval, (f"__import__('os').mkdir({self.path!r})",))


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cbuiltins\neval\n(V__import__('os').mkdir('TRAP')\ntR.",
        b"cbuiltins\ngetattr\n.",
        b"cos\nmkdir\n(VTRAP\ntR.",
        b"ctorch.serialization\nload\n(VTRAP\ntR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n.",
        b"ctorch.distributed.checkpoint.metadata\nos.mkdir\n(VTRAP\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__\n.",
        b"ctorch\nSize.__class__\n.",
        b"(iposix\nmkdir\n.",
    ],
)
def test_metadata_hostile_opcodes_refused(tmp_path: Path, opcodes: bytes) -> None:
    """Catches a global that is imported, by any opcode or through a dotted name."""
    trap = tmp_path / "ran"
    path = tmp_path / ".metadata"
    path.write_bytes(opcodes.replace(b"TRAP", str(trap).encode()))
    with pytest.raises(SourceError, match="unsafe-pickle"):
        read_metadata(path)
    assert not trap.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        b"N.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n.",
        # An extension code, and a state for a class instead of an object of it.
        b"\x80\x02\x82\x01.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n}Vx\nK\x01sb.",
        b"ctorch\nSize\n((I-1\nltR.",
    ],
)
def test_metadata_damaged_refused(tmp_path: Path, content: bytes) -> None:
    """Catches a traceback instead of an error, for a file that is no metadata."""
    path = tmp_path / ".metadata"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"unreadable-file|dcp-metadata-invalid"):
        read_metadata(path)


def test_load_inert_classes_do_not_share_state(tmp_path: Path) -> None:
    """Catches a pickle that changes the stand-ins of the next one."""
    content = b"cx\nRecord\n(NVstate\nVspoiled\nd" + b"tb."
    for _ in range(2):
        allowed = {"x.Record": make_record("Record")}
        with pytest.raises(SourceError, match="unreadable-file"):
            load_inert(content, path=tmp_path / "file", allowed=allowed)
        assert allowed["x.Record"]().state == {}


def write_range(folder: Path, content: bytes) -> MappedFile:
    """A file with `content` between other bytes, from byte 3 on."""
    path = folder / "__0_0.distcp"
    path.write_bytes(b"abc" + content + b"defg")
    return MappedFile(path)


def save_bytes(value: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("value", "error_id"),
    [
        ([torch.ones(2)], "unreadable-file"),
        (3, "unreadable-file"),
        (torch.ones(2).to_sparse(), "unsafe-pickle"),
        (torch.randn(2, dtype=torch.complex64).conj(), "unreadable-file"),
        (Payload(Path("nowhere")), "unsafe-pickle"),
    ],
)
def test_saved_tensor_other_things_refused(tmp_path: Path, value: Any, error_id: str) -> None:
    """Catches what is no plain tensor, read as one."""
    content = save_bytes(value)
    mapped = write_range(tmp_path, content)
    with pytest.raises(SourceError, match=error_id):
        find_tensor(mapped, start=3, nbytes=len(content))


def test_saved_tensor_damaged_refused(tmp_path: Path) -> None:
    """Catches a range that is cut, a compressed record, a tensor larger than its storage."""
    content = save_bytes(torch.randn(4, 4))
    mapped = write_range(tmp_path, content)
    assert find_tensor(mapped, start=3, nbytes=len(content)).shape == (4, 4)
    for start, nbytes in ((3, len(content) - 30), (0, 2), (4, len(content)), (3, 0)):
        with pytest.raises(SourceError, match="unreadable-file"):
            find_tensor(mapped, start=start, nbytes=nbytes)

    def rewrite(compression: int, storage_nbytes: int) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
            for name in old.namelist():
                data = old.read(name)[:storage_nbytes] if "/data/" in name else old.read(name)
                new.writestr(name, data, compress_type=compression)
        return buffer.getvalue()

    for compression, nbytes, passes in (
        (zipfile.ZIP_STORED, 64, True),
        (zipfile.ZIP_STORED, 60, False),
        (zipfile.ZIP_DEFLATED, 64, False),
    ):
        changed = rewrite(compression, nbytes)
        mapped = write_range(tmp_path, changed)
        if passes:
            assert find_tensor(mapped, start=3, nbytes=len(changed)).shape == (4, 4)
        else:
            with pytest.raises(SourceError, match="unreadable-file"):
                find_tensor(mapped, start=3, nbytes=len(changed))


def test_metadata_pickled_by_every_protocol_read(save: Path, tmp_path: Path) -> None:
    """Catches a reader that knows one pickle protocol's way to store the classes only."""
    real = pickle.loads((save / ".metadata").read_bytes())  # noqa: S301
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        path = tmp_path / ".metadata"
        path.write_bytes(pickle.dumps(real, protocol=protocol))
        assert read_metadata(path) == read_metadata(save / ".metadata")
