"""A trained MiniMax H3 transformer, published as the native package of its base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dist_merge import ModelMergerConfig, merge_model, validate_artifact
from tests.end_to_end.test_families import families  # noqa: F401
from tests.unit.test_minimax_h3 import base_dir, make_sources  # noqa: F401


@pytest.mark.parametrize("dtype", ["preserve", "bfloat16", "base"])
def test_native_package_of_a_real_run(
    families: Path,  # noqa: F811
    base_dir: Path,  # noqa: F811
    tmp_path: Path,
    dtype: str,
) -> None:
    """Catches stacked rows, unswapped halves, rounded fp32 tensors, two indexes, a lost file."""
    target = tmp_path / "out"
    result = merge_model(
        ModelMergerConfig(
            local_dir=families / "minimax_h3" / "actor",
            base_model=base_dir,
            target_dir=target,
            dtype=dtype,
            trust_checkpoint=True,
            quiet=True,
        )
    )
    assert result.artifact_type == "minimax_h3_pipeline"
    assert validate_artifact(target)["architecture"] == "MiniMaxH3Pipeline"
    published = load_file(target / "transformer" / "model.safetensors")
    base = load_file(base_dir / "transformer" / "model.safetensors")
    assert {n: t.dtype for n, t in published.items()} == {n: t.dtype for n, t in base.items()}
    assert sum(t.dtype == torch.float32 for t in published.values()) == 13
    assert torch.equal(published["rope.inv_freq"], base["rope.inv_freq"])
    # Diffusers' own converter is the judge of the row order.
    back = make_sources(published, layout="interleaved")
    reference = load_file(families / "minimax_h3" / "reference.safetensors")
    assert set(back) == set(reference)
    for name, tensor in back.items():
        assert torch.equal(tensor, reference[name].to(tensor.dtype)), name
    names = {p.relative_to(base_dir).as_posix() for p in base_dir.rglob("*") if p.is_file()}
    ours = {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()}
    assert ours == names | {"merge_manifest.json"}
    index = json.loads((target / "model_index.json").read_text())
    assert index == json.loads((base_dir / "model_index.json").read_text())
