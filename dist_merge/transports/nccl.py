"""Device memory between ranks: each message passes through a device buffer of fixed size.

Used with NCCL on GPUs. The same code runs with gloo on CPU "devices", which is how it is tested
where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RequestError
from ..group import Group
from .gloo import split_message, transfer_error


class DeviceTransport:
    """Point-to-point transfers to rank 0 through one device buffer per rank.

    Args:
        process_group: A group of the run's ranks that is registered nowhere.
        device: Where its transfers take place.
        buffer_nbytes: Size of the device buffer.

    Memory: one device buffer of `buffer_nbytes` on every rank.
    """

    name = "nccl"

    def __init__(self, process_group: Any, *, device: torch.device, buffer_nbytes: int) -> None:
        self._process_group = process_group
        self._buffer = torch.empty(buffer_nbytes, dtype=torch.uint8, device=device)

    @classmethod
    def open_nccl(cls, group: Group, *, buffer_nbytes: int, local_rank: int) -> DeviceTransport:
        """Make an NCCL group of the run's ranks.

        Raises:
            RequestError: This machine or this torch build has no NCCL or no GPU for the rank.

        Ranks: collective.
        """
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise RequestError(
                "no-nccl",
                "--comm-backend nccl needs a CUDA GPU and a torch build with NCCL",
                hint="use --comm-backend gloo",
            )
        if local_rank >= torch.cuda.device_count():
            raise RequestError(
                "no-nccl",
                f"local rank {local_rank} has no GPU of its own",
                found=f"{torch.cuda.device_count()} GPUs",
                hint="start at most one process per GPU, or use --comm-backend gloo",
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        process_group = None
        if group.size > 1:
            store = group.make_store("nccl")
            options = dist.ProcessGroupNCCL.Options()
            process_group = dist.ProcessGroupNCCL(store, group.rank, group.size, options)
        return cls(process_group, device=device, buffer_nbytes=buffer_nbytes)

    def transfer(
        self,
        *,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """See `contracts.Transport`."""
        nbytes = self._buffer.numel()
        try:
            for message in outgoing:
                for piece in split_message(message, nbytes):
                    staged = self._buffer[: piece.numel()]
                    staged.copy_(piece)
                    self._process_group.send([staged], 0, 0).wait()
            for source, message in incoming:
                for piece in split_message(message, nbytes):
                    staged = self._buffer[: piece.numel()]
                    self._process_group.recv([staged], source, 0).wait()
                    piece.copy_(staged)
        except RuntimeError as error:
            raise transfer_error(error) from error

    def close(self) -> None:
        """Release the device buffer and the group."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._process_group = None
