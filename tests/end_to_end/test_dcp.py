"""Saves of torch DCP, accelerate and DCP's Hugging Face storage, merged on one and two ranks."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_merge import ModelMergerConfig, merge_model
from tests.conftest import Lab
from tests.helpers.launch import torchrun

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def saves(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of save of the tiny model after a step on four ranks, in one torchrun start."""
    out = tmp_path_factory.mktemp("dcp")
    done = torchrun("tests.helpers.train_dcp", ["--pipeline", lab.base, "--out", out], nproc=4)
    assert done.code == 0, done.stderr[-5000:]
    return out


class Payload:
    """Makes a folder when a pickle runs it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


class Evaluated(Payload):
    """The same through `eval`."""

    def __reduce__(self) -> Any:
        return (eval, (f"__import__('os').mkdir({self.path!r})",))


class Loaded(Payload):
    """Through a function of torch that would open another pickle."""

    def __reduce__(self) -> Any:
        return (torch.load, (self.path, None, None))


class Case:
    """One merge on two ranks: its options, and a private copy of a save to spoil."""

    def __init__(self, lab: Lab, saves: Path, folder: Path) -> None:
        self.lab, self.saves, self.folder = lab, saves, folder
        self.config: dict[str, Any] = {
            "base_model": str(lab.base / "transformer"),
            "output_format": "transformer",
            "target_dir": str(folder / "out"),
            "hf_model_config_path": str(saves),
            "trust_checkpoint": True,
            "quiet": True,
            "buffer_size": 100_000,
        }

    def use(self, name: str, **options: Any) -> Path:
        """Merge a save where it lies."""
        self.config |= {"local_dir": str(self.saves / name), **options}
        return self.saves / name

    def copy(self, name: str = "rows/step-1") -> Path:
        """Merge a copy of a save; returns it."""
        path = Path(shutil.copytree(self.saves / name, self.folder / "save"))
        self.config["local_dir"] = str(path)
        return path

    def edit(self, change: Callable[[Any], None]) -> None:
        """Change the real `.metadata` object of a copy."""
        path = self.copy() / ".metadata"
        metadata = pickle.loads(path.read_bytes())  # noqa: S301
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    @property
    def trap(self) -> Path:
        """What exists when code from a checkpoint was run."""
        return self.folder / "payload-ran"


def rows(c: Case) -> None:
    c.use("rows/step-1", hf_model_config_path=None)


def columns(c: Case) -> None:
    c.use("columns/step-1", backend="dcp")


def columns_without_config(c: Case) -> None:
    c.use("columns/step-1", hf_model_config_path=None)


def hsdp(c: Case) -> None:
    c.use("hsdp", state_key="model", hf_model_config_path=None)


def hsdp_ema(c: Case) -> None:
    c.use("hsdp", state_key="ema")


def accelerate_root(c: Case) -> None:
    c.use("accelerate/checkpoint-1")


def hf(c: Case) -> None:
    c.use("hf", trust_checkpoint=False)


def hf_nested(c: Case) -> None:
    c.use("hf-nested", trust_checkpoint=False, backend="hf")


def hf_sharded(c: Case) -> None:
    c.use("hf-whole/sharded", trust_checkpoint=False)


def two_machines(c: Case) -> None:
    """`.metadata` and two files on one disk, the two others on another."""
    c.config["local_dir"] = str(c.folder / "disk{rank}")
    source = c.saves / "rows" / "step-1"
    for rank, names in enumerate(
        ([".metadata", "__0_0.distcp", "__3_0.distcp"], ["__1_0.distcp", "__2_0.distcp"])
    ):
        (c.folder / f"disk{rank}").mkdir()
        for name in names:
            shutil.copy2(source / name, c.folder / f"disk{rank}" / name)


def no_trust(c: Case) -> None:
    c.use("rows/step-1", trust_checkpoint=False)


def two_states(c: Case) -> None:
    c.use("hsdp")


def unknown_state(c: Case) -> None:
    c.use("rows/step-1", state_key="ema")


def optimizer_state(c: Case) -> None:
    c.use("rows/step-1", state_key="optim")


def state_of_rank_files(c: Case) -> None:
    c.config |= {"local_dir": str(c.lab.run() / "actor"), "state_key": "model"}


def optimizer_folder(c: Case) -> None:
    c.use("accelerate/checkpoint-1/optimizer_0")


def optimizer_folder_as_dcp(c: Case) -> None:
    c.use("accelerate/checkpoint-1/optimizer_0", backend="dcp")


def several_saves(c: Case) -> None:
    c.use(".")


def whole_files(c: Case) -> None:
    c.use("hf-whole")


def whole_files_as_hf(c: Case) -> None:
    c.use("hf-whole", backend="hf")


def missing_file(c: Case) -> None:
    (c.copy() / "__2_0.distcp").unlink()


def cut_file(c: Case) -> None:
    path = c.copy() / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:300_000])


def no_metadata(c: Case) -> None:
    (c.copy() / ".metadata").unlink()


def no_metadata_as_dcp(c: Case) -> None:
    no_metadata(c)
    c.config["backend"] = "dcp"


def unfinished_overwrite(c: Case) -> None:
    (c.copy() / ".metadata.tmp").write_bytes(b"")


def find(metadata: Any, name: str, *, at: int = 0) -> Any:
    """Index of the chunk of a tensor whose first offset is `at`."""
    return next(
        i for i in metadata.storage_data if i.fqn == name and i.offset and i.offset[0] == at
    )


def swapped_chunks(c: Case) -> None:
    def change(metadata: Any) -> None:
        data = metadata.storage_data
        first, second = find(metadata, "model.img_in.weight"), find(metadata, "model.img_in.bias")
        data[first], data[second] = data[second], data[first]

    c.edit(change)


def wrong_dtype(c: Case) -> None:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["model.img_in.weight"].properties.dtype = torch.float16

    c.edit(change)


def hole(c: Case) -> None:
    c.edit(lambda m: m.state_dict_metadata["model.img_in.weight"].chunks.pop())


def overlap(c: Case) -> None:
    def change(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["model.img_in.weight"].chunks
        chunks[0].sizes = torch.Size([chunks[0].sizes[0] + 1, chunks[0].sizes[1]])

    c.edit(change)


def transformed(c: Case) -> None:
    def change(metadata: Any) -> None:
        index = find(metadata, "model.img_in.weight")
        metadata.storage_data[index].transform_descriptors = ["stream.zstd"]

    c.edit(change)


def path_outside(c: Case) -> None:
    def change(metadata: Any) -> None:
        metadata.storage_data[find(metadata, "model.img_in.weight")].relative_path = "../x.distcp"

    c.edit(change)


def payload(c: Case) -> None:
    c.edit(lambda m: setattr(m, "storage_meta", Payload(c.trap)))


def payload_eval(c: Case) -> None:
    c.edit(lambda m: setattr(m, "storage_meta", Evaluated(c.trap)))


def payload_torch(c: Case) -> None:
    c.edit(lambda m: setattr(m, "storage_meta", Loaded(c.trap)))


def payload_alone(c: Case) -> None:
    (c.copy() / ".metadata").write_bytes(pickle.dumps(Payload(c.trap)))


def not_metadata(c: Case) -> None:
    (c.copy() / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))


def payload_in_tensor(c: Case) -> None:
    """A range of a data file that holds a pickle with code instead of a tensor."""

    def change(metadata: Any) -> None:
        info = metadata.storage_data[find(metadata, "model.img_in.weight")]
        path = c.folder / "save" / info.relative_path
        saved = io.BytesIO()
        torch.save(Payload(c.trap), saved)
        info.offset, info.length = path.stat().st_size, len(saved.getvalue())
        with path.open("ab") as file:
            file.write(saved.getvalue())

    c.edit(change)


def hf_missing_file(c: Case) -> None:
    (c.copy("hf") / "shard-00002-model-00001-of-00001.safetensors").unlink()


def hf_missing_last_file(c: Case) -> None:
    (c.copy("hf") / "shard-00004-model-00001-of-00001.safetensors").unlink()


def hf_bad_offsets(c: Case) -> None:
    path = c.copy("hf") / "shard-00002-model-00001-of-00001.safetensors"
    tensors = load_file(path)
    info = {name: {"saved_offsets": "0"} for name in tensors}
    save_file(tensors, path, metadata={"DCP_SHARDING_INFO": json.dumps(info)})


def hf_cut_file(c: Case) -> None:
    path = c.copy("hf") / "shard-00002-model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


GOOD: dict[Callable[[Case], None], str] = {
    rows: "rows/reference.safetensors",
    columns: "columns/reference.safetensors",
    hsdp: "hsdp/reference.safetensors",
    hsdp_ema: "hsdp/ema.safetensors",
    accelerate_root: "accelerate/reference.safetensors",
    hf: "hf-reference/reference.safetensors",
    hf_nested: "hf-nested-reference/reference.safetensors",
    hf_sharded: "hf-whole-reference/reference.safetensors",
    two_machines: "rows/reference.safetensors",
}
BAD: dict[Callable[[Case], None], tuple[str, str]] = {
    columns_without_config: ("actor-config-missing", "--hf_model_config_path"),
    no_trust: ("untrusted-checkpoint", "trust_checkpoint"),
    two_states: ("state-key-needed", "`ema` (77 tensors), `model` (77 tensors)"),
    unknown_state: ("state-key-unknown", "`model` (77 tensors)"),
    optimizer_state: ("state-key-unknown", "`optim`"),
    state_of_rank_files: ("bad-option", "`state_key`"),
    optimizer_folder: ("checkpoint-unsupported", "an optimizer's state"),
    optimizer_folder_as_dcp: ("no-model-state", "only an optimizer's state"),
    several_saves: ("checkpoint-ambiguous", "`columns/step-1`"),
    whole_files: ("already-merged", "sharded"),
    whole_files_as_hf: ("already-merged", "`model-00001-of-00001.safetensors`"),
    missing_file: ("dcp-files-missing", "`__2_0.distcp`"),
    cut_file: ("unreadable-file", "`__2_0.distcp`"),
    no_metadata: ("dcp-unfinished", "did not finish"),
    no_metadata_as_dcp: ("dcp-unfinished", "did not finish"),
    unfinished_overwrite: ("dcp-unfinished", "`.metadata.tmp`"),
    swapped_chunks: ("local-shard-size", "`img_in"),
    wrong_dtype: ("dtype-disagrees", "`img_in.weight`"),
    hole: ("local-shard-missing", "`img_in.weight`"),
    overlap: ("local-shard-overlap", "`img_in.weight`"),
    transformed: ("dcp-transformed", "stream.zstd"),
    path_outside: ("dcp-metadata-invalid", "../x.distcp"),
    payload: ("unsafe-pickle", "mkdir"),
    payload_eval: ("unsafe-pickle", "eval"),
    payload_torch: ("unsafe-pickle", "torch.serialization.load"),
    payload_alone: ("unsafe-pickle", "mkdir"),
    not_metadata: ("dcp-metadata-invalid", "dict"),
    payload_in_tensor: ("unsafe-pickle", "mkdir"),
    hf_missing_file: ("local-shard-missing", "elements are in no file"),
    hf_missing_last_file: ("shape-mismatch", "another shape"),
    hf_bad_offsets: ("unreadable-file", "DCP_SHARDING_INFO"),
    hf_cut_file: ("unreadable-file", "shard-00002"),
}


@pytest.fixture(scope="module")
def outcomes(lab: Lab, saves: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases on two ranks, in one torchrun start."""
    root = tmp_path_factory.mktemp("dcp-cases")
    cases = {}
    for make in (*GOOD, *BAD):
        folder = root / make.__name__
        folder.mkdir()
        cases[make.__name__] = case = Case(lab, saves, folder)
        make(case)
    (root / "seen").mkdir()
    listed = [{"name": name, "config": case.config} for name, case in cases.items()]
    (root / "cases.json").write_text(json.dumps(listed))
    done = torchrun(
        "tests.helpers.run_cases", [root / "cases.json", root / "seen"], nproc=2, timeout=280
    )
    assert done.code == 0, done.stderr[-5000:]
    return {
        name: (case, [json.loads((root / "seen" / f"{name}_{r}.json").read_text()) for r in (0, 1)])
        for name, case in cases.items()
    }


def check_weights(path: Path, reference: Path) -> None:
    """Compare a published file with full tensors, bit by bit."""
    found, wanted = load_file(path), load_file(reference)
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("make", GOOD, ids=lambda make: make.__name__)
def test_save_merged_by_two_ranks_equals_full_tensor(
    outcomes: dict[str, Any], saves: Path, make: Callable[[Case], None]
) -> None:
    """Catches wrong offsets, the wrong state dict, a lost chunk."""
    case, ranks = outcomes[make.__name__]
    assert [seen["error_id"] for seen in ranks] == [None, None], ranks
    check_weights(case.folder / "out" / WEIGHTS, saves / GOOD[make])


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_bad_save_refused(outcomes: dict[str, Any], make: Callable[[Case], None]) -> None:
    """Catches a refusal that is missing or unclear, and code that was run."""
    case, ranks = outcomes[make.__name__]
    error_id, part = BAD[make]
    assert [seen["error_id"] for seen in ranks] == [error_id] * 2, ranks
    assert part in ranks[0]["text"], ranks[0]["text"]
    assert not case.trap.exists(), "code from a checkpoint was run"
    assert not (case.folder / "out").exists()


@pytest.mark.parametrize("name", ["rows/step-1", "hf"])
def test_save_merged_by_one_process_is_a_pipeline(
    lab: Lab, saves: Path, outcomes: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """Catches bytes that depend on the number of ranks, and a pipeline Diffusers cannot open."""
    from diffusers import QwenImagePipeline

    result = merge_model(
        ModelMergerConfig(
            local_dir=saves / name,
            hf_model_config_path=saves,
            base_model=lab.base,
            target_dir=tmp_path / "out",
            trust_checkpoint=True,
            quiet=True,
        )
    )
    assert result.artifact_type == "diffusers_pipeline"
    assert any(note.startswith("found ") for note in result.notes)
    case, _ = outcomes["rows" if name.startswith("rows") else "hf"]
    ours = tmp_path / "out" / "transformer" / WEIGHTS
    assert ours.read_bytes() == (case.folder / "out" / WEIGHTS).read_bytes()
    pipeline = QwenImagePipeline.from_pretrained(str(tmp_path / "out"))
    case_weights = load_file(ours)
    for key, tensor in pipeline.transformer.state_dict().items():
        assert torch.equal(tensor, case_weights[key]), key
