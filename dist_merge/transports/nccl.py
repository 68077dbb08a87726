"""Device memory between ranks: messages pass through two device buffers of fixed size.

Used with NCCL on GPUs: a shard that lies on the device is sent as it lies, one in host memory is
staged; rank 0 receives the next piece while it copies the last one to the host. The same code runs
with gloo on CPU "devices", which is how it is tested where there is no GPU.
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
    """Point-to-point transfers to rank 0 through two device buffers per rank.

    Args:
        process_group: A group of the run's ranks that is registered nowhere.
        device: Where its transfers take place.
        buffer_nbytes: Size of one device buffer.

    Memory: two device buffers of `buffer_nbytes` on every rank.
    """

    name = "nccl"

    def __init__(self, process_group: Any, *, device: torch.device, buffer_nbytes: int) -> None:
        self._process_group = process_group
        self._buffers = [
            torch.empty(buffer_nbytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]

    @classmethod
    def open_nccl(cls, group: Group, *, buffer_nbytes: int, device: str) -> DeviceTransport:
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
        where = torch.device(device)
        if (where.index or 0) >= torch.cuda.device_count():
            raise RequestError(
                "no-nccl",
                f"this rank has no GPU of its own ({device})",
                found=f"{torch.cuda.device_count()} GPUs",
                hint="start at most one process per GPU, or use --comm-backend gloo",
            )
        # Of this thread alone; the trainer's own thread keeps its device.
        torch.cuda.set_device(where)
        process_group = None
        if group.size > 1:
            store = group.make_store("nccl")
            options = dist.ProcessGroupNCCL.Options()
            process_group = dist.ProcessGroupNCCL(store, group.rank, group.size, options)
        return cls(process_group, device=where, buffer_nbytes=buffer_nbytes)

    def transfer(
        self,
        *,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """See `contracts.Transport`."""
        nbytes = self._buffers[0].numel()
        try:
            self._send([p for message in outgoing for p in split_message(message, nbytes)])
            self._receive(
                [(rank, p) for rank, message in incoming for p in split_message(message, nbytes)]
            )
        except RuntimeError as error:
            peer = incoming[0][0] if incoming else 0
            raise transfer_error(error, peer=peer) from error

    def _send(self, pieces: Sequence[torch.Tensor]) -> None:
        """Send pieces in order; the buffers take turns, so one is filled while one is sent."""
        pending: list[Any] = []
        for number, piece in enumerate(pieces):
            if len(pending) == 2:
                pending.pop(0).wait()
            staged = piece
            if piece.device != self._buffers[0].device:
                staged = self._buffers[number % 2][: piece.numel()]
                staged.copy_(piece)
            pending.append(self._process_group.send([staged], 0, 0))
        for work in pending:
            work.wait()

    def _receive(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Receive pieces in order; the next one is under way while one is copied to the host."""
        pending: tuple[Any, torch.Tensor, torch.Tensor] | None = None
        for number, (source, piece) in enumerate(pieces):
            staged = self._buffers[number % 2][: piece.numel()]
            work = self._process_group.recv([staged], source, 0)
            if pending is not None:
                _finish(*pending)
            pending = (work, staged, piece)
        if pending is not None:
            _finish(*pending)

    def close(self) -> None:
        """Release the device buffers and the group."""
        self._buffers = []
        self._process_group = None


def _finish(work: Any, staged: torch.Tensor, piece: torch.Tensor) -> None:
    """Wait for a received piece and lay it where it belongs."""
    work.wait()
    piece.copy_(staged)
