"""One rank of a training job that publishes; a chosen rank is killed inside the call.

Started without a launcher, so that nobody but the ranks themselves notices. Usage:
`train_killed BASE OUT RANK WORLD_SIZE PORT STEP`: the last rank kills itself at STEP.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dist_merge import MergeError, merge_shards, publish_model

from .tiny_models import make_transformer


def main() -> None:
    """Publish, and write what this rank saw."""
    base, out = Path(sys.argv[1]), Path(sys.argv[2])
    rank, size, port = (int(text) for text in sys.argv[3:6])
    step = sys.argv[6]
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model = make_transformer()
    mesh = init_device_mesh("cpu", (size,))
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dist.barrier()

    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    seen: dict[str, Any] = {}
    try:
        if rank == size - 1 and step == "before":
            die()
        if rank == size - 1:
            with mock.patch.object(merge_shards, step, die):
                publish_model(model, base_model=base, target_dir=out / "target", quiet=True)
        else:
            publish_model(model, base_model=base, target_dir=out / "target", quiet=True, timeout=8)
        seen["error"] = None
    except MergeError as error:
        seen["error"] = str(error)
    seen["seconds"] = time.monotonic() - start
    (out / f"{rank}.json").write_text(json.dumps(seen))
    if rank == 0:
        time.sleep(2)  # the store lies here; a trainer would go on
    os._exit(0)


if __name__ == "__main__":
    main()
