"""A loop with accelerate that publishes at the end; the same code with DDP, FSDP2 or one process.

    accelerate launch --cpu --num_processes 2 -m examples.train_accelerate --base BASE --target OUT

On GPUs, `accelerate config` with FSDP version 2 and this script are all that is needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from diffusers import QwenImageTransformer2DModel

from dist_merge import publish_model
from tests.helpers.tiny_models import run_forward


def main() -> None:
    """Train and publish."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    arguments = parser.parse_args()
    # The last block of this transformer has parameters that no output depends on.
    options = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(kwargs_handlers=[options])
    model = QwenImageTransformer2DModel.from_pretrained(str(arguments.base / "transformer"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(run_forward(model).float().pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    # The prepared model is passed as it is; every rank calls.
    result = publish_model(model, base_model=arguments.base, target_dir=arguments.target)
    accelerator.print(result.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
