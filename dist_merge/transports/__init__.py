"""Ways to bring bytes to rank 0; one file each."""

from __future__ import annotations

from ..contracts import Transport
from ..errors import RequestError
from ..group import Group
from .gloo import GlooTransport
from .nccl import DeviceTransport


def open_transport(
    comm_backend: str, *, group: Group, buffer_nbytes: int, local_rank: int
) -> Transport:
    """Return the transport for `comm_backend`; `auto` means gloo, as rank files lie on the host.

    Args:
        comm_backend: auto, gloo or nccl.
        group: The ranks of this run.
        buffer_nbytes: Size of a device buffer, for transports that have one.
        local_rank: CUDA device index to use for nccl.

    Ranks: collective.
    """
    if comm_backend in ("auto", "gloo"):
        return GlooTransport(group)
    if comm_backend == "nccl":
        return DeviceTransport.open_nccl(group, buffer_nbytes=buffer_nbytes, local_rank=local_rank)
    raise RequestError("bad-option", f"`comm_backend` is {comm_backend!r}")
