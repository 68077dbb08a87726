"""Run many merges in one process group, as a trainer would, and record what every rank saw.

Run under torchrun: `run_cases CASES.json OUT_DIR`. A case is `{"name", "config", "plant"}`; OUT_DIR
gets `<name>_<rank>.json`. A plant damages something on purpose, see `PLANTS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dist_merge import MergeError, ModelMergerConfig, merge_model


@contextlib.contextmanager
def swap_rows() -> Iterator[None]:
    """Rank 0 lays two rows of one tensor in the wrong order."""
    from dist_merge import gather

    original = gather.lay_own_boxes

    def swapped(*args: Any, **kwargs: Any) -> Any:
        full = original(*args, **kwargs)
        name = next((n for n in full if full[n].dim() == 2 and full[n].shape[0] > 3), None)
        if name is not None:
            tensor = full[name].clone()
            tensor[[0, 1]] = tensor[[1, 0]]
            full[name] = tensor
        return full

    with mock.patch.object(gather, "lay_own_boxes", swapped):
        yield


@contextlib.contextmanager
def flip_byte(suffix: str, offset: int) -> Iterator[None]:
    """A disk that changes one byte of a file after it was written, before it is synced."""
    original = os.fsync

    def flipping(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(suffix):
            with open(path, "r+b") as file:
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ 1]))
        original(descriptor)

    with mock.patch.object(os, "fsync", flipping):
        yield


@contextlib.contextmanager
def break_writes(rank: int, number: int) -> Iterator[None]:
    """The disk of rank 0 is full at the n-th write of weights, in the middle of the gather."""
    from dist_merge.write import ShardWriter

    original, calls = ShardWriter.write, [0]

    def write(self: Any, tensor: Any) -> None:
        calls[0] += 1
        if dist.get_rank() == rank and calls[0] == number:
            raise OSError(28, "No space left on device", str(self.path.name))
        original(self, tensor)

    with mock.patch.object(ShardWriter, "write", write):
        yield


@contextlib.contextmanager
def no_noreplace(target: str) -> Iterator[None]:
    """A file system without RENAME_NOREPLACE; with `target`, someone makes it meanwhile."""
    from dist_merge import publish

    def refuse(source: Path, destination: Path) -> int:
        if target:
            Path(target).mkdir()
        return 22

    with mock.patch.object(publish, "rename_noreplace", refuse):
        yield


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """A disk with 1,000 bytes left."""
    from dist_merge import publish

    with mock.patch.object(publish, "free_nbytes", return_value=1000):
        yield


@contextlib.contextmanager
def device_transport() -> Iterator[None]:
    """The transport of GPUs, with gloo and buffers in host memory in their place."""
    from datetime import timedelta

    from dist_merge import run
    from dist_merge.transports.nccl import DeviceTransport

    def open_device(_: str, *, group: Any, **options: Any) -> Any:
        limit = timedelta(seconds=60)
        gloo = dist.ProcessGroupGloo(group.make_store("gloo"), group.rank, group.size, limit)
        return DeviceTransport(gloo, device=torch.device("cpu"), buffer_nbytes=3000)

    with mock.patch.object(run, "open_transport", open_device):
        yield


PLANTS: dict[str, Any] = {
    "swap_rows": swap_rows,
    "flip_weights": lambda: flip_byte("diffusion_pytorch_model.safetensors", 200_000),
    "flip_copy": lambda: flip_byte("merges.txt", 3),
    "break_writes": lambda: break_writes(0, 40),
    "no_noreplace": lambda: no_noreplace(""),
    "full_disk": full_disk,
    "device_transport": device_transport,
}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case on this rank."""
    start = time.monotonic()
    plant = case.get("plant")
    context = PLANTS[plant]() if plant in PLANTS else contextlib.nullcontext()
    if plant and plant.startswith("appears:"):
        context = no_noreplace(plant.partition(":")[2])
    # A path may differ per rank, as local disks of several machines do.
    config = {
        name: value.replace("{rank}", str(dist.get_rank())) if isinstance(value, str) else value
        for name, value in case["config"].items()
    }
    try:
        with context:
            result = merge_model(ModelMergerConfig(**config))
        seen: dict[str, Any] = {"error_id": None, "output_dir": result.output_dir}
    except MergeError as error:
        seen = {"error_id": error.error_id, "text": str(error)}
    seen["seconds"] = time.monotonic() - start
    seen["groups"] = len(dist.distributed_c10d._world.pg_map)
    return seen


def main() -> None:
    """Run all cases."""
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in cases:
        seen = run_case(case)
        (out / f"{case['name']}_{dist.get_rank()}.json").write_text(json.dumps(seen))
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
