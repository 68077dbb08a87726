"""One rank of a soak job: the real command line, with a fault planted in it.

Under torchrun (`python -m tests.failures.rank_process merge ...`) or as a child of a server that
has the libraries imported already (`run_rank`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel  # noqa: F401 - slow, once

from dist_merge import run  # noqa: F401 - likewise
from dist_merge.cli import main

from .points import Fault, plant


def run_rank(environment: dict[str, str], arguments: list[str], log: str) -> None:
    """Run one rank in this process, which ends with it."""
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    plant_from_environment()
    main(arguments)


def plant_from_environment() -> None:
    """Note this process down and plant the fault that `SOAK_FAULT` names."""
    folder = Path(os.environ["SOAK_NOTES"])
    (folder / f"{os.getpid()}.pid").touch()
    if os.environ.get("SOAK_FAULT"):
        plant(Fault.decode(os.environ["SOAK_FAULT"]), mark=folder / "mark")


if __name__ == "__main__":
    plant_from_environment()
    main(sys.argv[1:])
