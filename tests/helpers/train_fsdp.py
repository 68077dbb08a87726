"""A real FSDP2 training step on gloo ranks, saved the way verl saves an actor.

Run under torchrun. Writes for every requested case a folder with

    actor/model_world_size_W_rank_R.pt, actor/fsdp_config.json, actor/huggingface/config.json
    reference.safetensors     full_tensor() of every tensor, taken in the run
    forward.pt                output of the trained model on fixed inputs
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .tiny_models import run_forward

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def train_step(model: Any, *, dtype: torch.dtype) -> None:
    """One AdamW step on a real forward pass."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = run_forward(model, dtype=dtype).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def full_state(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Full tensors by name; collective."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in state.items()
    }


def save_actor(state: dict[str, Any], folder: Path, *, config: dict[str, Any]) -> None:
    """Save this rank's file, and the shared ones on rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        (folder / "huggingface").mkdir(parents=True, exist_ok=True)
        text = json.dumps(config, indent=4, sort_keys=True)
        (folder / "huggingface" / "config.json").write_text(text)
        (folder / "fsdp_config.json").write_text(
            json.dumps({"FSDP_version": 2, "world_size": size})
        )
    dist.barrier()
    torch.save(state, folder / f"model_world_size_{size}_rank_{rank}.pt")
    dist.barrier()


def train_and_save(pipeline: Path, out: Path, *, dtype_name: str, seed: int = 0) -> None:
    """Load the base's transformer, train it one step under FSDP2, save it. Collective."""
    from diffusers import QwenImageTransformer2DModel

    dtype = DTYPES.get(dtype_name, torch.float32)
    torch.manual_seed(seed)
    model = QwenImageTransformer2DModel.from_pretrained(
        str(pipeline / "transformer"), torch_dtype=dtype
    )
    config = {**model.config, "_class_name": "QwenImageTransformer2DModel"}
    config = json.loads(json.dumps(config))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train_step(model, dtype=dtype)
    state = model.state_dict()
    if dtype_name == "mixed":
        # Norm weights in bf16 beside fp32 matrices, as selective casts before a save leave them.
        state = {k: v.bfloat16() if "norm" in k else v for k, v in state.items()}
    full = full_state(state)
    with torch.no_grad():
        output = run_forward(model, dtype=dtype)
    save_actor(copy.copy(state), out / "actor", config=config)
    if dist.get_rank() == 0:
        save_file({k: v.contiguous() for k, v in full.items()}, out / "reference.safetensors")
        torch.save(output, out / "forward.pt")
    dist.barrier()


def main() -> None:
    """Train and save one checkpoint per requested dtype."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipeline", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for dtype_name in arguments.dtypes:
        name = arguments.out if len(arguments.dtypes) == 1 else arguments.out / dtype_name
        train_and_save(arguments.pipeline, name, dtype_name=dtype_name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
