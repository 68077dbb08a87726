"""Header of safetensors files: what is written loads elsewhere, what is broken is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dist_merge.errors import ArtifactError
from dist_merge.records import TensorSpec
from dist_merge.safetensors_header import encode_header, read_header


def write_raw(path: Path, text: str | bytes, payload: bytes = b"") -> Path:
    """Write a file with any header text."""
    raw = text.encode() if isinstance(text, str) else text
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + payload)
    return path


def make_entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    """One tensor's entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_read_header_of_a_saved_file_agrees_with_safetensors(tmp_path: Path) -> None:
    """Catches a wrong payload start, dtype name, or shape."""
    tensors = {
        "b": torch.arange(6, dtype=torch.float32).view(2, 3),
        "a": torch.ones(4, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3, dtype=torch.int64),
        "flag": torch.tensor(True),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert set(header.tensors) == set(tensors)
    content = path.read_bytes()[header.nbytes :]
    for name, tensor in tensors.items():
        entry = header.tensors[name]
        assert entry.spec == TensorSpec(tuple(tensor.shape), str(tensor.dtype)[6:])
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content[entry.begin : entry.end] == raw


def test_encode_header_makes_a_file_that_safetensors_loads(tmp_path: Path) -> None:
    """Catches wrong offsets, order or padding."""
    entries = [
        ("z", TensorSpec((2, 2), "float32")),
        ("é", TensorSpec((3,), "bfloat16")),
        ("empty", TensorSpec((0,), "float16")),
    ]
    values = {
        "z": torch.arange(4.0).view(2, 2),
        "é": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, dtype=torch.float16),
    }
    head = encode_header(entries, {"format": "pt"})
    assert len(head) % 8 == 0
    payload = b"".join(values[n].view(-1).view(torch.uint8).numpy().tobytes() for n, _ in entries)
    path = tmp_path / "y.safetensors"
    path.write_bytes(head + payload)
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor, values[name])
        assert tensor.dtype == values[name].dtype
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    header = read_header(path)
    assert [(n, e.spec) for n, e in header.tensors.items()] == entries
    assert header.nbytes == len(head)


def test_encode_header_with_a_name_twice_is_refused() -> None:
    """Catches a tensor silently lost to another of the same name."""
    spec = TensorSpec((1,), "float32")
    with pytest.raises(ArtifactError, match="same name"):
        encode_header([("a", spec), ("a", spec)], {})
    with pytest.raises(ArtifactError, match="same name"):
        encode_header([("__metadata__", spec)], {})


BROKEN: dict[str, tuple[str | bytes, int, str]] = {
    "hole": (json.dumps({"a": make_entry([1], 4, 8)}), 8, "starts at 4"),
    "overlap": (
        json.dumps({"a": make_entry([2], 0, 8), "b": make_entry([1], 4, 8)}),
        8,
        "starts at 4",
    ),
    "trailing": (json.dumps({"a": make_entry([1], 0, 4)}), 5, "end at 4"),
    "cut": (json.dumps({"a": make_entry([1], 0, 4)}), 3, "end at 4"),
    "size": (json.dumps({"a": make_entry([2], 0, 4)}), 4, "are not 8 bytes"),
    "negative offset": (json.dumps({"a": make_entry([1], -4, 0)}), 0, "malformed"),
    "negative shape": (json.dumps({"a": make_entry([-1], 0, 4)}), 4, "malformed"),
    "bool shape": (json.dumps({"a": make_entry([True], 0, 4)}), 4, "malformed"),
    "many dims": (json.dumps({"a": make_entry([1] * 65, 0, 4)}), 4, "malformed"),
    "huge": (json.dumps({"a": make_entry([2**61] * 9, 0, 4)}), 4, "are not"),
    "dtype": (json.dumps({"a": make_entry([1], 0, 4, "F33")}), 4, "unknown dtype"),
    "extra field": (json.dumps({"a": {**make_entry([1], 0, 4), "x": 1}}), 4, "malformed entry"),
    "metadata": (json.dumps({"__metadata__": {"a": 1}}), 0, "no map of text"),
    "list": ("[]", 0, "does not start"),
    "space": (" {}", 0, "does not start"),
    "twice": ('{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":1}', 4, "duplicate"),
    "depth": ('{"a":' + "[" * 100_000 + "}", 0, "no JSON"),
    "utf-8": (b'{"\xff": 1}', 0, "no JSON"),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_read_header_of_a_broken_file_is_refused(tmp_path: Path, name: str) -> None:
    """Catches a rule of the format that is not checked."""
    text, nbytes, message = BROKEN[name]
    path = write_raw(tmp_path / "x.safetensors", text, b"\0" * nbytes)
    with pytest.raises(ArtifactError, match=message) as caught:
        read_header(path)
    assert caught.value.error_id == "bad-safetensors"


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, (10**9).to_bytes(8, "little")])
def test_read_header_of_a_wrong_length_is_refused(tmp_path: Path, content: bytes) -> None:
    """Catches a read past the file, or a huge allocation from a forged length."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="header of"):
        read_header(path)
