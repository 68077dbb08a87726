"""The load check of published weights against the class that their config makes."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch

from dist_merge.errors import ArtifactError
from dist_merge.load_check import check_load
from dist_merge.records import TensorSpec
from tests.helpers.tiny_transformers import list_all


def save_config(folder: Path, family: str) -> dict[str, TensorSpec]:
    """Save a real class's config; returns the tensors it makes."""
    tiny = list_all()[family]
    with torch.device("meta"):
        model = getattr(diffusers, tiny.class_name)(**tiny.config)
    model.save_config(folder)
    state = model.state_dict()
    return {name: TensorSpec(tuple(value.shape), "float32") for name, value in state.items()}


@pytest.mark.parametrize("family", sorted(list_all()))
def test_check_load_of_a_fitting_folder_passes(tmp_path: Path, family: str) -> None:
    """Catches a class whose state dict is not what its files hold."""
    tensors = save_config(tmp_path, family)
    before = torch.get_rng_state()
    assert check_load(tmp_path, directory=".", tensors=tensors) == "passed"
    # A trainer may draw numbers in another thread meanwhile, so nothing may be drawn here.
    assert torch.equal(torch.get_rng_state(), before)


def test_check_load_names_missing_unexpected_and_misshapen_tensors(tmp_path: Path) -> None:
    """Catches what Diffusers accepts silently: a tensor that the files lack."""
    tensors = save_config(tmp_path, "sd3")
    name = "proj_out.weight"
    shape = tensors[name].shape
    for changed in (
        {n: spec for n, spec in tensors.items() if n != name},
        {**tensors, name: TensorSpec((shape[0], shape[1] + 1), "float32")},
        {**tensors, "proj_out.more": TensorSpec(shape, "float32")},
    ):
        with pytest.raises(ArtifactError, match=r"load-mismatch.*\n?.*proj_out"):
            check_load(tmp_path, directory=".", tensors=changed)


def test_check_load_of_a_config_with_another_depth_is_refused(tmp_path: Path) -> None:
    """Catches a config that does not belong to the weights."""
    tensors = save_config(tmp_path, "sd3")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_layers": config["num_layers"] + 1}))
    with pytest.raises(ArtifactError, match="load-mismatch"):
        check_load(tmp_path, directory=".", tensors=tensors)


def test_check_load_of_an_unknown_class_is_not_run(tmp_path: Path) -> None:
    """Catches a recheck that fails on what a newer version published."""
    (tmp_path / "config.json").write_text('{"_class_name": "NewTransformer"}')
    assert check_load(tmp_path, directory=".", tensors={}) == "not_run"
