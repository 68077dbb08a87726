"""How long a training step stands still for a publish, against saving the same shards.

    torchrun --nproc_per_node=2 -m benchmarks.measure_stall [--gib 1]

Prints, per rank: seconds of `torch.save` of the local shards, seconds of the call of
`publish_model_async`, seconds until its result, seconds of `publish_model`, and the host memory
each took beyond what was there before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dist_merge import publish_model, publish_model_async

from .measure_memory import read_private_kib


class PeakMemory:
    """Samples this process's private memory every 5 ms; `extra_mib` is the peak above the start."""

    def __enter__(self) -> PeakMemory:
        self._start = self._peak = read_private_kib(os.getpid())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self._peak = max(self._peak, read_private_kib(os.getpid()))

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def extra_mib(self) -> float:
        """Peak above the start in MiB."""
        return (self._peak - self._start) / 1024


def make_model(gib: float) -> QwenImageTransformer2DModel:
    """A Qwen-Image transformer of about `gib` GiB in bf16, real widths, fewer blocks."""
    layers = max(1, round(gib * 2**30 / 2 / 340_000_000))
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(num_layers=layers)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    return model


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folders = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(folders)
    folder = Path(str(folders[0]))
    model = make_model(arguments.gib)
    if rank == 0:
        model.save_pretrained(folder / "base")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dist.barrier()
    rows = {}

    start = time.monotonic()
    torch.save(model.state_dict(), folder / f"rank_{rank}.pt")
    rows["torch.save of the shards"] = time.monotonic() - start
    dist.barrier()

    options = {"base_model": folder / "base", "output_format": "transformer", "quiet": True}
    publish_model(model, target_dir=folder / "warm", **options)  # imports are not measured
    with PeakMemory() as memory:
        start = time.monotonic()
        handle = publish_model_async(model, target_dir=folder / "async", **options)
        rows["publish_model_async, call to return"] = time.monotonic() - start
        handle.result()
        rows["publish_model_async, call to result"] = time.monotonic() - start
    rows["publish_model_async, extra MiB"] = memory.extra_mib
    dist.barrier()
    with PeakMemory() as memory:
        start = time.monotonic()
        publish_model(model, target_dir=folder / "live", **options)
        rows["publish_model"] = time.monotonic() - start
    rows["publish_model, extra MiB"] = memory.extra_mib
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if turn == rank:
            for name, value in rows.items():
                print(f"rank {rank}  {name:40} {value:8.2f}", flush=True)
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
