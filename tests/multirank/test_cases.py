"""Every refusal and every planted mistake, with two real ranks in a group of their own."""

from __future__ import annotations

import filecmp
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

from tests.conftest import Lab
from tests.helpers.launch import torchrun

WEIGHTS = "diffusion_pytorch_model.safetensors"


class Payload:
    """A pickle that would create a file when it is run."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


class Workshop:
    """Makes the spoiled inputs of one case."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.config: dict[str, Any] = {
            "local_dir": str(lab.run() / "actor"),
            "base_model": str(lab.base),
            "target_dir": str(folder / "out"),
            "trust_checkpoint": True,
            "quiet": True,
            "buffer_size": 100_000,
            "timeout": 60,
        }
        self.plant: str | None = None

    @property
    def target(self) -> Path:
        return Path(self.config["target_dir"])

    def actor(self) -> Path:
        path = self.lab.copy_actor(self.folder / "actor")
        self.config["local_dir"] = str(path)
        return path

    def base(self) -> Path:
        path = self.lab.copy_base(self.folder / "base")
        self.config["base_model"] = str(path)
        return path

    def edit_state(self, change: Callable[[dict[str, Any]], None], rank: int = 1) -> None:
        path = self.actor() / f"model_world_size_2_rank_{rank}.pt"
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)

    def edit_json(self, path: Path, **changes: Any) -> None:
        data = json.loads(path.read_text())
        data.update(changes)
        path.write_text(json.dumps({k: v for k, v in data.items() if v != "REMOVE"}))


def no_trust(w: Workshop) -> None:
    w.config["trust_checkpoint"] = False


def existing_folder(w: Workshop) -> None:
    w.target.mkdir()
    (w.target / "precious").write_text("mine")


def existing_empty_folder(w: Workshop) -> None:
    w.target.mkdir()


def existing_file(w: Workshop) -> None:
    w.target.write_text("mine")


def dangling_link(w: Workshop) -> None:
    w.target.symlink_to(w.folder / "nowhere")


def missing_parent(w: Workshop) -> None:
    w.config["target_dir"] = str(w.folder / "no" / "out")


def target_in_source(w: Workshop) -> None:
    w.config["target_dir"] = str(w.actor() / "out")


def target_in_base(w: Workshop) -> None:
    w.config["target_dir"] = str(w.base() / "out")


def source_in_base(w: Workshop) -> None:
    actor = w.base() / "actor"
    w.lab.copy_actor(actor)
    w.config["local_dir"] = str(actor)


def missing_rank_file(w: Workshop) -> None:
    (w.actor() / "model_world_size_2_rank_1.pt").unlink()


def extra_rank_file(w: Workshop) -> None:
    actor = w.actor()
    shutil.copy(actor / "model_world_size_2_rank_1.pt", actor / "model_world_size_2_rank_2.pt")


def mixed_world_sizes(w: Workshop) -> None:
    actor = w.actor()
    shutil.copy(actor / "model_world_size_2_rank_1.pt", actor / "model_world_size_3_rank_2.pt")


def swapped_names(w: Workshop) -> None:
    actor = w.actor()
    zero, one = (actor / f"model_world_size_2_rank_{r}.pt" for r in (0, 1))
    zero.rename(actor / "x")
    one.rename(zero)
    (actor / "x").rename(one)


def wrong_folder(w: Workshop) -> None:
    step = w.folder / "global_step_1"
    w.lab.copy_actor(step / "actor")
    w.config["local_dir"] = str(step)
    w.config["backend"] = "fsdp"


def truncated_file(w: Workshop) -> None:
    path = w.actor() / "model_world_size_2_rank_1.pt"
    path.write_bytes(path.read_bytes()[:-5000])


def payload(w: Workshop) -> None:
    def add(state: dict[str, Any]) -> None:
        state["evil"] = Payload(str(w.folder / "payload-ran"))

    w.edit_state(add)


def payload_without_trust(w: Workshop) -> None:
    payload(w)
    w.config["trust_checkpoint"] = False


def raw_payload(w: Workshop) -> None:
    path = w.actor() / "model_world_size_2_rank_1.pt"
    path.write_bytes(pickle.dumps(Payload(str(w.folder / "payload-ran"))))


def not_a_number(w: Workshop) -> None:
    def spoil(state: dict[str, Any]) -> None:
        state["proj_out.weight"]._local_tensor[0, 0] = float("nan")

    w.edit_state(spoil)


def infinity(w: Workshop) -> None:
    def spoil(state: dict[str, Any]) -> None:
        state["proj_out.weight"]._local_tensor[0, 0] = float("inf")

    w.edit_state(spoil)


def overflow(w: Workshop) -> None:
    def spoil(state: dict[str, Any]) -> None:
        state["proj_out.weight"]._local_tensor[0, 0] = 1e6

    w.edit_state(spoil)
    w.config["dtype"] = "float16"


def missing_piece(w: Workshop) -> None:
    w.edit_state(lambda state: state.pop("proj_out.weight"))


def missing_tensor(w: Workshop) -> None:
    w.edit_state(lambda state: state.pop("proj_out.bias"))
    path = Path(w.config["local_dir"]) / "model_world_size_2_rank_0.pt"
    state = torch.load(path, weights_only=False)
    del state["proj_out.bias"]
    torch.save(state, path)


def unexpected_tensor(w: Workshop) -> None:
    w.edit_state(lambda state: state.update(extra=torch.zeros(2)))


def wrong_local_shape(w: Workshop) -> None:
    def cut(state: dict[str, Any]) -> None:
        value = state["proj_out.weight"]
        value._local_tensor = value._local_tensor[:-1]

    w.edit_state(cut)


def partial_placement(w: Workshop) -> None:
    def spoil(state: dict[str, Any]) -> None:
        from torch.distributed.tensor import Partial

        state["proj_out.weight"]._spec.placements = (Partial(),)

    w.edit_state(spoil)


def replicas_differ(w: Workshop) -> None:
    actor = w.actor()
    for rank in (0, 1):
        path = actor / f"model_world_size_2_rank_{rank}.pt"
        state = torch.load(path, weights_only=False)
        state["proj_out.bias"] = torch.full((16,), float(rank))
        torch.save(state, path)


def dtype_differs_between_ranks(w: Workshop) -> None:
    w.edit_state(lambda s: s.update({"proj_out.bias": s["proj_out.bias"].bfloat16()}))


def unknown_architecture(w: Workshop) -> None:
    base = w.base()
    w.edit_json(base / "transformer" / "config.json", _class_name="NoSuchTransformer")


def actor_other_class(w: Workshop) -> None:
    w.edit_json(w.actor() / "huggingface" / "config.json", _class_name="FluxTransformer2DModel")


def actor_config_differs(w: Workshop) -> None:
    w.edit_json(w.actor() / "huggingface" / "config.json", guidance_embeds=True)


def actor_config_unknown_field(w: Workshop) -> None:
    w.edit_json(w.actor() / "huggingface" / "config.json", flux_capacitor=1)


def actor_config_missing(w: Workshop) -> None:
    (w.actor() / "huggingface" / "config.json").unlink()


def actor_config_only_defaults(w: Workshop) -> None:
    """Not an error: a default left out, and where the base came from."""
    changes = {"guidance_embeds": "REMOVE", "_name_or_path": "/x", "_diffusers_version": "0.1"}
    w.edit_json(w.actor() / "huggingface" / "config.json", **changes)


def base_weights_change_shape(w: Workshop) -> None:
    path = w.base() / "transformer" / WEIGHTS
    state = load_file(path)
    state["proj_out.bias"] = torch.zeros(17)
    save_file(state, path, metadata={"format": "pt"})


def base_component_missing(w: Workshop) -> None:
    shutil.rmtree(w.base() / "vae")


def base_remote_code(w: Workshop) -> None:
    (w.base() / "transformer" / "modeling.py").write_text("raise SystemExit('imported')")


def base_remote_code_trusted(w: Workshop) -> None:
    base_remote_code(w)
    w.config["trust_remote_code"] = True


def base_folder_link(w: Workshop) -> None:
    base = w.base()
    shutil.move(base / "vae", w.folder / "elsewhere")
    (base / "vae").symlink_to(w.folder / "elsewhere")


def base_index_lies(w: Workshop) -> None:
    base = w.base() / "transformer"
    names = dict.fromkeys(("a", "b"), "diffusion_pytorch_model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": 8}, "weight_map": names}
    (base / WEIGHTS).rename(base / "diffusion_pytorch_model-00001-of-00001.safetensors")
    (base / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def full_disk(w: Workshop) -> None:
    w.plant = "full_disk"


def break_writes(w: Workshop) -> None:
    w.plant = "break_writes"


def swap_rows(w: Workshop) -> None:
    w.plant = "swap_rows"


def swap_rows_before_cast(w: Workshop) -> None:
    w.plant = "swap_rows"
    w.config["dtype"] = "bfloat16"


def flip_weights(w: Workshop) -> None:
    w.plant = "flip_weights"


def flip_copy(w: Workshop) -> None:
    w.plant = "flip_copy"


def target_appears(w: Workshop) -> None:
    w.plant = f"appears:{w.target}"


def no_noreplace(w: Workshop) -> None:
    w.plant = "no_noreplace"


def device_transport(w: Workshop) -> None:
    w.plant = "device_transport"


# Case -> (error id, a part of its message); None where the merge must succeed.
CASES: dict[Callable[[Workshop], None], tuple[str, str] | None] = {
    no_trust: ("untrusted-checkpoint", "require explicit trust_checkpoint=True"),
    existing_folder: ("target-exists", "already exists"),
    existing_empty_folder: ("target-exists", "already exists"),
    existing_file: ("target-exists", "already exists"),
    dangling_link: ("target-exists", "already exists"),
    missing_parent: ("target-parent-missing", "does not exist"),
    target_in_source: ("paths-overlap", "inside an input"),
    target_in_base: ("paths-overlap", "inside an input"),
    source_in_base: ("paths-overlap", "inside each other"),
    missing_rank_file: ("rank-files-missing", "no file for rank 1"),
    extra_rank_file: ("rank-files-extra", "rank 2"),
    mixed_world_sizes: ("mixed-world-sizes", "world sizes 2, 3"),
    swapped_names: ("rank-mismatch", "renamed"),
    wrong_folder: ("no-rank-files", "`actor`"),
    truncated_file: ("unreadable-file", "model_world_size_2_rank_1.pt"),
    payload: ("unsafe-pickle", "mkdir"),
    payload_without_trust: ("untrusted-checkpoint", "trust_checkpoint"),
    raw_payload: ("unreadable-file", "model_world_size_2_rank_1.pt"),
    not_a_number: ("not-finite", "`proj_out.weight`"),
    infinity: ("not-finite", "`proj_out.weight`"),
    overflow: ("cast-overflow", "`proj_out.weight`"),
    missing_piece: ("local-shard-missing", "`proj_out.weight`"),
    missing_tensor: ("tensor-missing", "`proj_out.bias`"),
    unexpected_tensor: ("tensor-unexpected", "`extra`"),
    wrong_local_shape: ("local-shard-size", "`proj_out.weight`"),
    partial_placement: ("placement-partial", "partial sums"),
    replicas_differ: ("replica-differs", "`proj_out.bias`"),
    dtype_differs_between_ranks: ("dtype-disagrees", "`proj_out.bias`"),
    unknown_architecture: ("architecture-unknown", "QwenImageTransformer2DModel"),
    actor_other_class: ("class-mismatch", "FluxTransformer2DModel"),
    actor_config_differs: ("config-mismatch", "`guidance_embeds`"),
    actor_config_unknown_field: ("config-field-unknown", "`flux_capacitor`"),
    actor_config_missing: ("actor-config-missing", "--hf_model_config_path"),
    actor_config_only_defaults: None,
    base_weights_change_shape: ("base-class-mismatch", "`proj_out.bias`"),
    base_component_missing: ("component-missing", "vae"),
    base_remote_code: ("remote-code", "modeling.py"),
    base_remote_code_trusted: None,
    base_folder_link: ("bad-entry", "vae"),
    base_index_lies: ("index-mismatch", "index"),
    full_disk: ("disk-full", "1000 bytes free"),
    break_writes: ("io-error", "No space left"),
    swap_rows: ("value-differs", "differs from its source"),
    swap_rows_before_cast: ("value-differs", "assembled in memory"),
    flip_weights: ("value-differs", "read back from"),
    flip_copy: ("copy-differs", "merges.txt"),
    target_appears: ("target-exists", "already exists"),
    no_noreplace: None,
    device_transport: None,
}
IDS = [make.__name__ for make in CASES]


@pytest.fixture(scope="module")
def outcomes(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases in one torchrun start; per case the workshop and what both ranks saw."""
    root = tmp_path_factory.mktemp("cases")
    workshops, cases = {}, []
    for make in CASES:
        folder = root / make.__name__
        folder.mkdir()
        workshop = Workshop(lab, folder)
        make(workshop)
        workshops[make.__name__] = workshop
        case = {"name": make.__name__, "config": workshop.config, "plant": workshop.plant}
        cases.append(case)
    before = {name: list_entries(w.target) for name, w in workshops.items()}
    (root / "seen").mkdir()
    (root / "cases.json").write_text(json.dumps(cases))
    done = torchrun(
        "tests.helpers.run_cases", [root / "cases.json", root / "seen"], nproc=2, timeout=280
    )
    assert done.code == 0, done.stderr[-5000:]
    return {
        name: {
            "workshop": workshop,
            "before": before[name],
            "ranks": [
                json.loads((root / "seen" / f"{name}_{rank}.json").read_text()) for rank in (0, 1)
            ],
        }
        for name, workshop in workshops.items()
    }


def list_entries(target: Path) -> Any:
    """What is at a target: nothing, a link, a file's text, or a folder's names."""
    if target.is_symlink():
        return os.readlink(target)
    if target.is_dir():
        return sorted(os.listdir(target))
    return target.read_text() if target.exists() else None


@pytest.mark.parametrize("make", CASES, ids=IDS)
def test_case(outcomes: dict[str, Any], make: Callable[[Workshop], None]) -> None:
    """Catches a refusal that is missing, unclear, not shared by all ranks, or leaves something."""
    outcome = outcomes[make.__name__]
    workshop, ranks, expected = outcome["workshop"], outcome["ranks"], CASES[make]
    parent = workshop.target.parent
    if parent.is_dir():
        assert not [n for n in os.listdir(parent) if ".dist_merge-" in n], "staging folder left"
    assert not (workshop.folder / "payload-ran").exists(), "code from a checkpoint was run"
    assert {seen["groups"] for seen in ranks} == {1}, "a process group was left behind"
    if expected is None:
        assert [seen["error_id"] for seen in ranks] == [None, None], ranks
        assert (workshop.target / "merge_manifest.json").is_file()
        return
    error_id, part = expected
    assert [seen["error_id"] for seen in ranks] == [error_id] * 2, ranks
    assert ranks[0]["text"] == ranks[1]["text"], "all ranks report the same first cause"
    assert part in ranks[0]["text"], ranks[0]["text"]
    assert max(seen["seconds"] for seen in ranks) < 60
    if workshop.plant and workshop.plant.startswith("appears:"):
        assert list_entries(workshop.target) == [], "someone else's folder was touched"
    else:
        assert list_entries(workshop.target) == outcome["before"], "the target was touched"


def test_device_transport_same_bytes(outcomes: dict[str, Any]) -> None:
    """Catches pieces laid in the wrong order while two buffers take turns."""
    one, two = (outcomes[name]["workshop"].target for name in ("no_noreplace", "device_transport"))
    names = sorted(p.relative_to(one).as_posix() for p in one.rglob("*") if p.is_file())
    _, mismatch, errors = filecmp.cmpfiles(one, two, names, shallow=False)
    assert (mismatch, errors) == ([], [])
