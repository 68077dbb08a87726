"""LoRA with Diffusers' `add_adapter` under FSDP2, published folded in and as an adapter.

    torchrun --nproc_per_node=2 -m examples.train_lora --base BASE --out OUT

OUT gets `fused` (a pipeline without a trace of PEFT) and `adapter` (the base pipeline with
`lora_adapter/` in it, for `pipe.load_lora_weights`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dist_merge import publish_model
from tests.helpers.tiny_models import run_forward


def main() -> None:
    """Train and publish."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    arguments.out.mkdir(exist_ok=True)
    model = QwenImageTransformer2DModel.from_pretrained(str(arguments.base / "transformer"))
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=8, lora_alpha=16, use_rslora=True, target_modules=targets))
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(2):
        run_forward(model).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # r, alpha and rsLoRA come from the model's own peft_config.
    for name, is_fused in (("fused", True), ("adapter", False)):
        target = arguments.out / name
        result = publish_model(
            model, base_model=arguments.base, target_dir=target, fuse_lora=is_fused
        )
        if dist.get_rank() == 0:
            print(result.output_dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
