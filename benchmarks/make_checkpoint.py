"""Write a base transformer and rank files of a given size, with Qwen-Image's mix of tensors.

Usage: python -m benchmarks.make_checkpoint FOLDER [--gib 1] [--world-size 2] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def make_model(*, nbytes: int, dtype: torch.dtype) -> Any:
    """A Qwen-Image transformer of about `nbytes`: as many blocks as fit."""
    from diffusers import QwenImageTransformer2DModel

    def build(num_layers: int) -> Any:
        return QwenImageTransformer2DModel(
            num_layers=num_layers,
            attention_head_dim=128,
            num_attention_heads=8,
            joint_attention_dim=512,
            axes_dims_rope=(16, 56, 56),
        )

    with torch.device("meta"):
        sizes = [sum(p.numel() for p in build(n).parameters()) for n in (1, 2)]
    block = sizes[1] - sizes[0]
    num_layers = max(1, round((nbytes / dtype.itemsize - sizes[0]) / block) + 1)
    torch.manual_seed(0)
    return build(num_layers).to(dtype)


def write_rank_file(state: dict[str, torch.Tensor], path: Path, *, rank: int, size: int) -> None:
    """Write one rank's rows of every tensor as DTensors, as FSDP2 would."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    mesh = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("fsdp",))
    pieces = {}
    for name, tensor in state.items():
        step = -(-tensor.shape[0] // size)
        local = tensor[rank * step : (rank + 1) * step].clone()
        pieces[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    torch.save(pieces, path)
    dist.destroy_process_group()


def main() -> None:
    """Write base and checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    model = make_model(nbytes=int(options.gib * 2**30), dtype=getattr(torch, options.dtype))
    model.save_pretrained(options.folder / "base")
    actor = options.folder / "actor"
    (actor / "huggingface").mkdir(parents=True)
    config = {**model.config, "_class_name": type(model).__name__}
    (actor / "huggingface" / "config.json").write_text(json.dumps(config, default=list))
    state = {name: tensor.detach() + 0.5 for name, tensor in model.state_dict().items()}
    for rank in range(options.world_size):
        name = f"model_world_size_{options.world_size}_rank_{rank}.pt"
        write_rank_file(state, actor / name, rank=rank, size=options.world_size)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    print(f"{len(state)} tensors, {nbytes / 2**30:.2f} GiB, {options.world_size} rank files")


if __name__ == "__main__":
    main()
