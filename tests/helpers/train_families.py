"""Train every family's tiny transformer for one FSDP2 step; run under torchrun.

Writes below `--out`, per family: `base/`, `actor/`, `reference.safetensors`, `forward.pt`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .tiny_transformers import build, list_all, run_forward
from .train_fsdp import full_state, save_actor


def train_family(name: str, out: Path) -> None:
    """One AdamW step, saved the way verl saves an actor. Collective."""
    model = build(name)
    if dist.get_rank() == 0:
        model.save_pretrained(out / "base")
    config = {**model.config, "_class_name": type(model).__name__}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for module in model.children():
        if isinstance(module, torch.nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sum(output.pow(2).mean() for output in run_forward(model, name)).backward()
    optimizer.step()
    state = model.state_dict()
    full = full_state(state)
    with torch.no_grad():
        outputs = run_forward(model, name)
    save_actor(state, out / "actor", config=json.loads(json.dumps(config, default=list)))
    if dist.get_rank() == 0:
        save_file({k: v.contiguous() for k, v in full.items()}, out / "reference.safetensors")
        torch.save(outputs, out / "forward.pt")
    dist.barrier()


def main() -> None:
    """Train all families."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in list_all():
        train_family(name, arguments.out / name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
