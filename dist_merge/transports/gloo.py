"""Host memory to host memory over a gloo process group: messages are sent as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import PeerError

# Messages are cut so that progress shows and a failure is noticed between the pieces.
PIECE_NBYTES = 64 * 2**20


class GlooTransport:
    """Point-to-point transfers to rank 0 of `group`; with no group there is nobody to talk to."""

    name = "gloo"

    def __init__(self, group: Any) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group) if group is not None else [0]

    def transfer(
        self,
        *,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """See `contracts.Transport`."""
        try:
            works = [
                dist.irecv(piece, src=self._ranks[source], group=self._group)
                for source, message in incoming
                for piece in message.split(PIECE_NBYTES)
            ]
            works += [
                dist.isend(piece, dst=self._ranks[0], group=self._group)
                for message in outgoing
                for piece in message.split(PIECE_NBYTES)
            ]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(
                "transfer-failed",
                "a transfer between ranks broke off",
                found=str(error).strip().splitlines()[0][:200],
                hint="another rank ended or the network failed; see the other ranks' output",
            ) from error

    def close(self) -> None:
        """Nothing to release: the group belongs to `group.open_group`."""
