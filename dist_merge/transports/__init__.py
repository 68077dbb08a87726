"""Ways to bring bytes to rank 0; one file each."""

from __future__ import annotations

import torch.distributed as dist

from ..contracts import Transport
from ..errors import RequestError
from ..group import Group
from ..membership import local_rank
from .gloo import GlooTransport
from .nccl import DeviceTransport


def open_transport(
    comm_backend: str, *, group: Group, buffer_nbytes: int, device: str | None
) -> Transport:
    """Return the transport for `comm_backend`; `auto` is nccl where all shards lie on GPUs.

    Args:
        comm_backend: auto, gloo or nccl.
        group: The ranks of this run.
        buffer_nbytes: Size of a device buffer, for transports that have one.
        device: This rank's CUDA device where the shards of every rank lie on one, else None.

    Ranks: collective.
    """
    if comm_backend == "nccl" or (comm_backend == "auto" and device and dist.is_nccl_available()):
        device = device or f"cuda:{local_rank()}"
        return DeviceTransport.open_nccl(group, buffer_nbytes=buffer_nbytes, device=device)
    if comm_backend in ("auto", "gloo"):
        return GlooTransport(group)
    raise RequestError("bad-option", f"`comm_backend` is {comm_backend!r}")
