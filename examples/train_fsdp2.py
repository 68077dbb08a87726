"""A plain FSDP2 loop that publishes every few steps.

    torchrun --nproc_per_node=2 -m examples.train_fsdp2 --base BASE --out OUT [--steps 4]

BASE is a Qwen-Image pipeline; a tiny one is made with `python -m examples.train_fsdp2 --make BASE`.
OUT gets `step-2`, `step-4`, ...: whole pipelines for `DiffusionPipeline.from_pretrained`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dist_merge import publish_model_async
from tests.helpers.tiny_models import build_pipeline, run_forward


def main() -> None:
    """Train and publish."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path)
    parser.add_argument("--make", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.make:
        build_pipeline(arguments.make)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    arguments.out.mkdir(exist_ok=True)
    model = QwenImageTransformer2DModel.from_pretrained(str(arguments.base / "transformer"))
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    publishes = []
    for step in range(1, arguments.steps + 1):
        run_forward(model).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            target = arguments.out / f"step-{step}"
            # Every rank calls it; it returns as soon as this rank's shards are copied.
            publishes.append(
                publish_model_async(model, base_model=arguments.base, target_dir=target)
            )
    for publish in publishes:
        result = publish.result()
        if dist.get_rank() == 0:
            print(result.output_dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
