"""The examples run as their first lines say, and what they publish loads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from dist_merge import validate_artifact
from tests.conftest import Lab
from tests.helpers.launch import python, torchrun
from tests.helpers.tiny_models import make_inputs, make_transformer

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def test_fsdp2_loop(lab: Lab, tmp_path: Path) -> None:
    """Catches an example that does not run, or publishes one step twice."""
    arguments = ["--base", lab.base, "--out", tmp_path / "out"]
    done = torchrun("examples.train_fsdp2", arguments, nproc=2)
    assert done.code == 0, done.stderr
    two, four = (tmp_path / "out" / name for name in ("step-2", "step-4"))
    assert done.stdout.split() == [str(two), str(four)]
    for folder in (two, four):
        validate_artifact(folder)
    name = "proj_out.weight"
    assert not torch.equal(load_file(two / WEIGHTS)[name], load_file(four / WEIGHTS)[name])


def test_accelerate_loop(lab: Lab, tmp_path: Path) -> None:
    """Catches a prepared model that is not understood, under a launcher and without."""
    done = torchrun(
        "examples.train_accelerate", ["--base", lab.base, "--target", tmp_path / "two"], nproc=2
    )
    assert done.code == 0, done.stderr
    arguments = ["--base", str(lab.base), "--target", str(tmp_path / "one")]
    done = python("examples.train_accelerate", arguments)
    assert done.code == 0, done.stderr
    for folder in ("one", "two"):
        validate_artifact(tmp_path / folder)


def test_lora_loop(lab: Lab, tmp_path: Path) -> None:
    """Catches an adapter published with another strength than it was trained with."""
    from diffusers import DiffusionPipeline

    arguments = ["--base", lab.base, "--out", tmp_path / "out"]
    done = torchrun("examples.train_lora", arguments, nproc=2)
    assert done.code == 0, done.stderr
    fused, adapter = tmp_path / "out" / "fused", tmp_path / "out" / "adapter"
    for folder in (fused, adapter):
        validate_artifact(folder)
    one = DiffusionPipeline.from_pretrained(str(fused)).transformer
    pipeline = DiffusionPipeline.from_pretrained(str(adapter))
    with torch.no_grad():
        plain = pipeline.transformer(**make_inputs()).sample
        pipeline.load_lora_weights(str(adapter / "lora_adapter"))
        two = pipeline.transformer(**make_inputs()).sample
        assert torch.allclose(one(**make_inputs()).sample, two, atol=1e-5)
        assert not torch.allclose(plain, two, atol=1e-5)


def test_publish_callback(lab: Lab, tmp_path: Path) -> None:
    """Catches a callback that a Trainer does not call, or that publishes to one folder only."""
    from transformers import Trainer, TrainingArguments

    from dist_merge import PublishCallback

    class Loop(Trainer):
        """The smallest trainer for a model without labels."""

        def compute_loss(self, model: torch.nn.Module, inputs: dict, **_: object) -> torch.Tensor:
            return model(**make_inputs()).sample.pow(2).mean() + 0 * inputs["x"].sum()

    callback = PublishCallback(
        base_model=lab.base, target_dir=tmp_path / "out", output_format="transformer", quiet=True
    )
    data = [{"x": torch.zeros(1)} for _ in range(4)]
    settings = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, save_steps=1, report_to=[], use_cpu=True,
        per_device_train_batch_size=1, remove_unused_columns=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = Loop(make_transformer(), settings, train_dataset=data, callbacks=[callback])
    trainer.train()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["step-1", "step-2"]
    last = load_file(tmp_path / "out" / "step-2" / "diffusion_pytorch_model.safetensors")
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(last[name], tensor.cpu()), name
