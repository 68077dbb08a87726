"""Write a benchmark checkpoint's weights in the formats of other tools; run under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def main() -> None:
    """Every rank puts the rows of its rank file on a live mesh and saves them."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    path = folder / "actor" / f"model_world_size_{size}_rank_{rank}.pt"
    state = {}
    for name, value in torch.load(path, weights_only=False, mmap=True).items():
        local = value._local_tensor.clone()
        shape, stride = value.shape, value.stride()
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
    dcp.save({"model": state}, checkpoint_id=str(folder / "dcp"))
    writer = HuggingFaceStorageWriter(path=str(folder / "hf"), save_distributed=True)
    dcp.save(state, storage_writer=writer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
