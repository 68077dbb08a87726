"""Host memory to host memory over a gloo process group: messages are sent as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import PeerError
from ..group import Group

# Messages are cut so that progress shows and a failure is noticed between the pieces.
PIECE_NBYTES = 64 * 2**20


class GlooTransport:
    """Point-to-point transfers to rank 0; with one rank there is nobody to talk to.

    The process group is made directly, under this run's own store prefix, and is registered
    nowhere: a trainer's groups and their numbering stay as they are.
    """

    name = "gloo"

    def __init__(self, group: Group) -> None:
        self._gloo: Any = None
        if group.size > 1:
            self._gloo = dist.ProcessGroupGloo(
                group.make_store("gloo"),
                group.rank,
                group.size,
                timedelta(seconds=group.timeout),
            )

    def transfer(
        self,
        *,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """See `contracts.Transport`."""
        peer = 0
        works = []
        try:
            for source, message in incoming:
                peer = source
                for piece in split_message(message, PIECE_NBYTES):
                    works.append((source, self._gloo.recv([piece], source, 0)))
            for message in outgoing:
                peer = 0
                # gloo reads host memory only.
                for piece in split_message(message.cpu(), PIECE_NBYTES):
                    works.append((0, self._gloo.send([piece], 0, 0)))
            for peer, work in works:  # noqa: B007 - named in the error
                work.wait()
        except RuntimeError as error:
            raise transfer_error(error, peer=peer) from error

    def close(self) -> None:
        """Close the connections."""
        self._gloo = None


def split_message(message: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """Cut a message into views of at most `nbytes`, the same way on both sides."""
    return [message[start : start + nbytes] for start in range(0, message.numel(), nbytes)]


def transfer_error(error: RuntimeError, *, peer: int) -> PeerError:
    """The error for a transfer that broke off; seldom the first cause."""
    return PeerError(
        "transfer-failed",
        f"the transfer with rank {peer} broke off",
        found=str(error).strip().splitlines()[0][:200],
        hint="another rank ended or the network failed; see the other ranks' output",
    )
