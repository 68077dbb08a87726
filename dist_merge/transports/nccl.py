"""Device memory between ranks: each message passes through a device buffer of fixed size.

Used with NCCL on GPUs. The same code runs with gloo on CPU "devices", which is how it is tested
where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import PeerError, RequestError


class DeviceTransport:
    """Point-to-point transfers to rank 0 through one device buffer per rank.

    Memory: one device buffer of `buffer_nbytes` on every rank.
    """

    name = "nccl"

    def __init__(
        self, group: Any, *, device: torch.device, buffer_nbytes: int, owns_group: bool
    ) -> None:
        self._group = group
        self._owns_group = owns_group
        self._ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        self._buffer = torch.empty(buffer_nbytes, dtype=torch.uint8, device=device)

    @classmethod
    def open_nccl(cls, own_group: Any, *, buffer_nbytes: int, local_rank: int) -> DeviceTransport:
        """Make an NCCL group of the ranks of `own_group`.

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
        group = None
        if own_group is not None:
            ranks = dist.get_process_group_ranks(own_group)
            group = dist.new_group(ranks, backend="nccl", use_local_synchronization=True)
        return cls(group, device=device, buffer_nbytes=buffer_nbytes, owns_group=group is not None)

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
                for piece in message.split(nbytes):
                    staged = self._buffer[: piece.numel()]
                    staged.copy_(piece)
                    dist.send(staged, dst=self._ranks[0], group=self._group)
            for source, message in incoming:
                for piece in message.split(nbytes):
                    staged = self._buffer[: piece.numel()]
                    dist.recv(staged, src=self._ranks[source], group=self._group)
                    piece.copy_(staged)
        except RuntimeError as error:
            raise PeerError(
                "transfer-failed",
                "a transfer between ranks broke off",
                found=str(error).strip().splitlines()[0][:200],
                hint="another rank ended or the network failed; see the other ranks' output",
            ) from error

    def close(self) -> None:
        """Release the device buffer and the NCCL group."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if self._owns_group:
            dist.destroy_process_group(self._group)
            self._owns_group = False
