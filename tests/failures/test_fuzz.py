"""Damaged and random input to every parser: only errors of ours may come out."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dist_merge import MergeError, validate_artifact
from dist_merge.actor_config import read_actor_config
from dist_merge.base_weights import read_component_weights
from dist_merge.files import sha256_file
from dist_merge.manifest import MANIFEST_NAME
from dist_merge.records import SourceFile
from dist_merge.safetensors_header import read_header
from dist_merge.sources.dcp import DcpSource
from dist_merge.sources.rank_files import RankFileSource
from tests.conftest import Lab
from tests.unit.test_published import WEIGHTS, make_published

pytestmark = pytest.mark.slow

QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SLOW = settings(QUICK, max_examples=80)
RANK_FILE = "model_world_size_1_rank_0.pt"

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/passwd", "a\\b", "a\nb", "..", "", "F32", "BF16", "\ud800"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
# Where to change a file (a part of its length), what to do there, and with which byte.
EDITS = st.lists(
    st.tuples(
        st.floats(0, 1), st.sampled_from(["set", "cut", "insert", "repeat"]), st.binary(max_size=9)
    ),
    min_size=1,
    max_size=4,
)


def edit(content: bytes, edits: list[tuple[float, str, bytes]]) -> bytes:
    """Damage some bytes."""
    result = bytearray(content)
    for part, action, new in edits:
        at = int(part * len(result))
        if action == "set":
            result[at : at + len(new)] = new
        elif action == "cut":
            del result[at : at + 1 + len(new)]
        elif action == "insert":
            result[at:at] = new
        else:
            result[at:at] = result[at : at + 40]
    return bytes(result)


def only_ours(action: Callable[[], object]) -> None:
    """Run; an error of ours is fine, any other is raised."""
    with suppress(MergeError):
        action()


NASTY: list[Any] = [
    None, True, -1, 2**80, 1.5, float("inf"), "", "../x", "/x", "\ud800", "a\0b",
    [], {}, [[]], [{}],
    {"a": []}, {"": None}, [0, "0"],
]  # fmt: skip


def replace_each(data: Any) -> Iterator[Any]:
    """Copies of JSON data with one value, anywhere in it, replaced by something nasty or gone."""
    yield from NASTY
    for key in list(data if isinstance(data, dict) else range(len(data))):
        rest = copy.copy(data)
        del rest[key]
        yield rest
        node = data[key]
        for inner in replace_each(node) if isinstance(node, (dict, list)) else NASTY:
            changed = copy.copy(data)
            changed[key] = inner
            yield changed


@QUICK
@given(edits=EDITS)
def test_safetensors_bytes(tmp_path: Path, edits: list[tuple[float, str, bytes]]) -> None:
    """Catches a header reader that stumbles over bytes."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3, 2), "b": torch.ones(1)}, path, metadata={"format": "pt"})
    path.write_bytes(edit(path.read_bytes()[:200], edits))
    only_ours(lambda: read_header(path))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small published folder."""
    return make_published(tmp_path_factory.mktemp("fuzz") / "out")


def test_every_field_of_a_published_folder(tmp_path: Path) -> None:
    """Catches a field of manifest, config or index whose type nobody checked."""
    folder = make_published(tmp_path / "out")
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    for data in replace_each(manifest):
        (folder / MANIFEST_NAME).write_text(json.dumps(data))
        only_ours(lambda: validate_artifact(folder))
    # A folder whose manifest agrees with whatever its own configs say.
    for name in ("config.json", "model_index.json", f"{WEIGHTS}.index.json"):
        content = {"_class_name": "TinyPipeline", "weight_map": {"a": WEIGHTS}}
        # 2**80 layers would take 20,000 modules to be refused, so it is tried only once, below.
        for data in replace_each({**content, "metadata": {"total_size": 24}}):
            (folder / name).write_text(json.dumps(data))
            files = {**manifest["files"], name: sha256_file(folder / name)}
            sizes = {**manifest["file_sizes"], name: (folder / name).stat().st_size}
            text = json.dumps({**manifest, "files": files, "file_sizes": sizes})
            (folder / MANIFEST_NAME).write_text(text)
            only_ours(lambda: validate_artifact(folder))
        if name != "config.json":
            (folder / name).unlink()
        else:
            (folder / name).write_text('{"_class_name": "Tiny"}')


def test_endless_model_is_refused(tmp_path: Path) -> None:
    """Catches a config that keeps a recheck, or a merge, busy for ever."""
    folder = make_published(tmp_path / "out")
    config = {"_class_name": "QwenImageTransformer2DModel", "num_layers": 2**80}
    config |= {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": [4, 6, 6]}
    (folder / "config.json").write_text(json.dumps(config))
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["files"]["config.json"] = sha256_file(folder / "config.json")
    manifest["file_sizes"]["config.json"] = (folder / "config.json").stat().st_size
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(MergeError, match="modules"):
        validate_artifact(folder)


def test_every_field_of_a_header_and_an_index(tmp_path: Path) -> None:
    """Catches the same in what a base model's files say."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    path = tmp_path / WEIGHTS
    for data in replace_each({"a": entry, "__metadata__": {"format": "pt"}}):
        text = json.dumps(data).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        only_ours(lambda: read_header(path))
    name = "model-00001-of-00001.safetensors"
    save_file({"a": torch.ones(1)}, tmp_path / name)
    names = [name, "model.safetensors.index.json"]
    for data in replace_each({"metadata": {"total_size": 4}, "weight_map": {"a": name}}):
        (tmp_path / names[1]).write_text(json.dumps(data))
        only_ours(
            lambda: read_component_weights(tmp_path, folder=".", paths=names, stems=["model"])
        )


@QUICK
@given(edits=EDITS)
def test_manifest_bytes(published: Path, edits: list[tuple[float, str, bytes]]) -> None:
    """Catches the same for damaged text."""
    path = published / MANIFEST_NAME
    content = path.read_bytes()
    try:
        path.write_bytes(edit(content, edits))
        only_ours(lambda: validate_artifact(published))
    finally:
        path.write_bytes(content)


@QUICK
@given(value=JSON)
def test_actor_config(tmp_path: Path, value: Any) -> None:
    """Catches a trained model's config of another type."""
    (tmp_path / "config.json").write_text(json.dumps(value))
    only_ours(lambda: read_actor_config(tmp_path))


def read_rank_file(folder: Path) -> None:
    """Open and describe one rank file, and look at every piece."""
    source = RankFileSource()
    files: list[SourceFile] = source.find_files(folder)
    reader = source.open(folder, files)
    try:
        for shard in reader.describe(0):
            tensor = reader.read(shard.source_file, shard.source_key)
            assert tensor.numel() >= 0
    finally:
        reader.close()


@SLOW
@given(edits=EDITS)
def test_rank_file(lab: Lab, tmp_path: Path, edits: list[tuple[float, str, bytes]]) -> None:
    """Catches a pickle, damaged anywhere in its program, that crashes or is believed."""
    content = (lab.run() / "actor" / "model_world_size_2_rank_0.pt").read_bytes()
    start, end = find_pickle(content)
    program = edit(content[start:end], edits)[: end - start].ljust(end - start, b".")
    (tmp_path / RANK_FILE).write_bytes(content[:start] + program + content[end:])
    only_ours(lambda: read_rank_file(tmp_path))


@SLOW
@given(edits=EDITS)
def test_rank_file_archive(lab: Lab, tmp_path: Path, edits: list[tuple[float, str, bytes]]) -> None:
    """Catches an archive whose directory lies: names, offsets, sizes."""
    content = (lab.run() / "actor" / "model_world_size_2_rank_0.pt").read_bytes()
    directory = content.index(b"PK\x01\x02")
    (tmp_path / RANK_FILE).write_bytes(content[:directory] + edit(content[directory:], edits))
    only_ours(lambda: read_rank_file(tmp_path))


def find_pickle(content: bytes) -> tuple[int, int]:
    """Where the pickle program lies in an uncompressed archive."""
    start = content.index(b"\x80\x02", content.index(b"data.pkl"))
    return start, content.index(b"PK", start)


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP folder."""
    folder = tmp_path_factory.mktemp("fuzz-dcp")
    state = {"model": {"a": torch.randn(3, 2), "b": torch.randn(4).bfloat16()}, "step": 1}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def read_dcp(folder: Path) -> None:
    """Open and describe a DCP folder, and read every piece."""
    source = DcpSource()
    files = source.find_files(folder)
    bound = source.with_index([source.read_index(folder, files)], state_key=None)
    bound.check_complete([file.path for file in files])
    reader = bound.open(folder, files)
    try:
        for shard in reader.describe(0):
            reader.read(shard.source_file, shard.source_key)
    finally:
        reader.close()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_dcp(save: Path, tmp_path: Path, name: str) -> None:
    """Catches a DCP pickle or data file, damaged anywhere, that crashes or is believed."""
    folder = Path(shutil.copytree(save, tmp_path / "save"))
    content = (save / name).read_bytes()
    read_dcp(folder)

    @QUICK
    @given(edits=EDITS)
    def check(edits: list[tuple[float, str, bytes]]) -> None:
        (folder / name).write_bytes(edit(content, edits))
        only_ours(lambda: read_dcp(folder))

    check()
