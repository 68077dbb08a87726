"""Shared fixtures: one tiny pipeline and its real checkpoints, made once per session."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.launch import torchrun
from tests.helpers.tiny_models import build_pipeline


@dataclass(frozen=True)
class Lab:
    """A base pipeline and what training runs wrote."""

    root: Path
    base: Path

    def run(self, dtype: str = "float32") -> Path:
        """Folder of the run with this dtype: `actor`, `reference.safetensors`, `forward.pt`."""
        return self.root / "runs" / dtype

    def copy_actor(self, folder: Path, dtype: str = "float32") -> Path:
        """A copy of the actor that a test may spoil."""
        return Path(shutil.copytree(self.run(dtype) / "actor", folder))

    def copy_base(self, folder: Path) -> Path:
        """A copy of the base that a test may spoil."""
        return Path(shutil.copytree(self.base, folder))


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Train the tiny model for one step on two ranks, in three dtypes, in one torchrun start."""
    root = tmp_path_factory.mktemp("lab")
    base = build_pipeline(root / "base")
    done = torchrun(
        "tests.helpers.train_fsdp",
        ["--pipeline", base, "--out", root / "runs", "--dtypes", "float32", "bfloat16", "mixed"],
        nproc=2,
    )
    assert done.code == 0, done.stderr
    return Lab(root, base)


@pytest.fixture(scope="session")
def written(lab: Lab) -> Path:
    """The trained model at world sizes 1, 2, 3, 5 and the odd tensors, in one torchrun start."""
    out = lab.root / "written"
    arguments = ["--pipeline", lab.base, "--out", out]
    arguments += ["--reference", lab.run() / "reference.safetensors"]
    done = torchrun("tests.helpers.write_checkpoints", arguments, nproc=5)
    assert done.code == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train LoRA adapters on every family, and their variants, in one torchrun start."""
    out = tmp_path_factory.mktemp("lora")
    done = torchrun("tests.helpers.train_lora", ["--out", out], nproc=2, timeout=400)
    assert done.code == 0, done.stderr
    return out
