"""Every placement, size and dtype, merged by 1 to 3 ranks against what was distributed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launch import python, torchrun
from tests.helpers.write_checkpoints import LAYOUTS


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_odd_tensors_any_layout_equal(written: Path, tmp_path: Path, nproc: int) -> None:
    """Catches wrong offsets, lost empty shards, strided boxes, 0-d and integer tensors."""
    arguments = [written / "odd", tmp_path, *LAYOUTS]
    module = "tests.helpers.merge_state"
    done = torchrun(module, arguments, nproc=nproc) if nproc > 1 else python(module, arguments)
    assert done.code == 0, done.stderr
    reference = load_file(written / "odd" / "reference.safetensors")
    for layout in LAYOUTS:
        found: dict[str, torch.Tensor] = {}
        for path in sorted((tmp_path / layout).glob("*.safetensors")):
            found.update(load_file(path))
        assert set(found) == set(reference), json.dumps(sorted(found))
        for name, tensor in reference.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), (layout, name)
