"""Bring the source tensors of one bucket to rank 0, with a digest of every box.

Two halves: `prepare_bucket` reads, checks and digests this rank's boxes and may fail; after all
ranks agreed, `gather_bucket` only moves bytes and can fail by a dead peer alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from .contracts import SourceReader, Transport
from .errors import SourceError
from .group import Group
from .operations import is_finite, iter_contiguous
from .records import Bucket, MergePlan, PlannedBox, SourceTensor, item_nbytes

DIGEST_NBYTES = 16
# Boxes below this travel packed in one message per rank and bucket.
SMALL_NBYTES = 2**18
# Strided boxes are received in row blocks of about this size before they are laid in place.
WINDOW_NBYTES = 64 * 2**20


@dataclass(frozen=True)
class HeldBox:
    """One box of the bucket that this rank holds."""

    source: SourceTensor
    box: PlannedBox
    tensor: torch.Tensor
    digest: bytes
    is_sent: bool


@dataclass(frozen=True)
class GatheredBucket:
    """Rank 0: full source tensors, and per tensor the digest every holder took of every box."""

    tensors: Mapping[str, torch.Tensor]
    digests: Mapping[str, Sequence[bytes]]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor of any dtype as 1-D uint8, without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def digest_tensor(tensor: torch.Tensor, *, group: Group | None = None) -> bytes:
    """128-bit xxh3 digest of a tensor's elements in row-major order; no copy of its size."""
    state = xxhash.xxh3_128()
    for piece in iter_contiguous(tensor):
        # A piece on a GPU comes to the host here, a few megabytes at a time.
        state.update(as_bytes(piece).cpu().numpy().data)
        if group is not None:
            group.advance(piece.nbytes)
    return state.digest()


def take_box(full: torch.Tensor, box: PlannedBox) -> torch.Tensor:
    """View of a full tensor that a box covers."""
    index = tuple(
        slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True)
    )
    return full[index] if index else full


def iter_holders(source: SourceTensor) -> Iterator[tuple[PlannedBox, int, str, str, bool]]:
    """Yield (box, holder, source file, source key, is sent) in an order equal on all ranks."""
    for box in source.boxes:
        yield box, box.sender, box.source_file, box.source_key, True
        for holder, file, key in box.replicas:
            yield box, holder, file, key, False


def prepare_bucket(
    plan: MergePlan, bucket: Bucket, *, reader: SourceReader, group: Group
) -> list[HeldBox]:
    """Read, check and digest the boxes this rank holds.

    Raises:
        SourceError: A piece has another shape than described, or holds NaN or infinity.
    """
    held = []
    for fqn in bucket.inputs:
        source = plan.sources[fqn]
        for box, holder, file, key, is_sent in iter_holders(source):
            if holder != group.rank:
                continue
            tensor = reader.read(file, key)
            if tuple(tensor.shape) != box.sizes:
                raise SourceError(
                    "source-changed",
                    f"tensor `{fqn}` changed its shape since the inspection",
                    where=f"`{file}`",
                    expected=str(list(box.sizes)),
                    found=str(list(tensor.shape)),
                )
            digest = digest_tensor(tensor, group=group)
            if not is_finite(tensor):
                raise SourceError(
                    "not-finite",
                    f"tensor `{fqn}` holds NaN or infinity",
                    where=f"`{file}`, offsets {list(box.offsets)}, sizes {list(box.sizes)}",
                    hint="training diverged before this save; merge an earlier checkpoint",
                )
            held.append(HeldBox(source, box, tensor, digest, is_sent))
    return held


def gather_bucket(
    plan: MergePlan,
    bucket: Bucket,
    *,
    held: Sequence[HeldBox],
    transport: Transport,
    group: Group,
) -> GatheredBucket | None:
    """Move the bucket's boxes to rank 0.

    Returns:
        On rank 0 the full tensors; None on other ranks.

    Ranks: collective, after an agreement.
    Memory: rank 0 holds the bucket, the packed messages and one window of a strided box.
    """
    if group.rank != 0:
        send_boxes(held, transport=transport)
        return None
    full = lay_own_boxes(plan, bucket, held=held)
    digests: dict[str, list[bytes]] = {}
    packs = receive_packs(plan, bucket, transport=transport, size=group.size)
    own = iter(held)
    positions = [0] * group.size
    large: list[tuple[int, torch.Tensor]] = []
    for fqn in bucket.inputs:
        source = plan.sources[fqn]
        digests[fqn] = []
        for box, holder, _, _, is_sent in iter_holders(source):
            if holder == 0:
                digests[fqn].append(next(own).digest)
                continue
            pack, start = packs[holder], positions[holder]
            digests[fqn].append(bytes(pack[start : start + DIGEST_NBYTES].tolist()))
            start += DIGEST_NBYTES
            if is_sent:
                target = take_box(full[fqn], box)
                if target.nbytes <= SMALL_NBYTES:
                    block = pack[start : start + target.nbytes]
                    target.copy_(restore(block, target))
                    start += target.nbytes
                else:
                    large.append((holder, target))
            positions[holder] = start
    receive_large(large, transport=transport, group=group)
    return GatheredBucket(full, digests)


def restore(block: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View received bytes with the shape and dtype of `like`; copies when they lie unaligned."""
    if block.data_ptr() % like.element_size():
        block = block.clone()
    return block.view(like.dtype).view(like.shape)


def pack_nbytes(plan: MergePlan, bucket: Bucket, *, rank: int) -> int:
    """Size of the packed message `rank` sends for a bucket."""
    total = 0
    for fqn in bucket.inputs:
        source = plan.sources[fqn]
        width = item_nbytes(source.spec.dtype)
        for box, holder, _, _, is_sent in iter_holders(source):
            if holder == rank:
                total += DIGEST_NBYTES
                if is_sent and box.numel * width <= SMALL_NBYTES:
                    total += box.numel * width
    return total


def send_boxes(held: Sequence[HeldBox], *, transport: Transport) -> None:
    """Send digests and small boxes packed, then large boxes as they lie."""
    parts: list[torch.Tensor] = []
    large: list[torch.Tensor] = []
    for item in held:
        parts.append(torch.frombuffer(bytearray(item.digest), dtype=torch.uint8))
        if not item.is_sent:
            continue
        if item.tensor.nbytes <= SMALL_NBYTES:
            parts.append(as_bytes(item.tensor.contiguous()).cpu())
        else:
            large.append(item.tensor)
    if parts:
        transport.transfer(outgoing=[torch.cat(parts)], incoming=[])
    for tensor in large:
        for window in iter_windows(tensor):
            transport.transfer(outgoing=[as_bytes(window.contiguous())], incoming=[])


def receive_packs(
    plan: MergePlan, bucket: Bucket, *, transport: Transport, size: int
) -> dict[int, torch.Tensor]:
    """Receive the packed message of every rank that holds boxes of the bucket."""
    packs = {}
    for rank in range(1, size):
        nbytes = pack_nbytes(plan, bucket, rank=rank)
        if nbytes:
            packs[rank] = torch.empty(nbytes, dtype=torch.uint8)
    transport.transfer(outgoing=[], incoming=list(packs.items()))
    return packs


def receive_large(
    large: Sequence[tuple[int, torch.Tensor]], *, transport: Transport, group: Group
) -> None:
    """Receive large boxes: straight into place where they lie contiguous, else by windows."""
    queues: dict[int, list[torch.Tensor]] = {}
    for sender, target in large:
        queues.setdefault(sender, []).extend(iter_windows(target))
    while queues:
        incoming, laid = [], []
        # One window of every sender at a time keeps all of them busy in bounded memory.
        for sender in sorted(queues):
            target = queues[sender].pop(0)
            message = (
                target
                if target.is_contiguous()
                else torch.empty_like(target, memory_format=torch.contiguous_format)
            )
            incoming.append((sender, as_bytes(message)))
            laid.append((target, message))
        transport.transfer(outgoing=[], incoming=incoming)
        for target, message in laid:
            if message is not target:
                target.copy_(message)
            group.advance(target.nbytes)
        queues = {sender: queue for sender, queue in queues.items() if queue}


def iter_windows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a box into row blocks of about WINDOW_NBYTES; the same cut on both sides."""
    if tensor.nbytes <= WINDOW_NBYTES or tensor.dim() == 0:
        yield tensor
        return
    row_nbytes = max(1, tensor.nbytes // tensor.shape[0])
    if row_nbytes > WINDOW_NBYTES:
        for row in tensor:
            yield from iter_windows(row)
        return
    step = max(1, WINDOW_NBYTES // row_nbytes)
    for start in range(0, tensor.shape[0], step):
        yield tensor[start : start + step]


def lay_own_boxes(
    plan: MergePlan, bucket: Bucket, *, held: Sequence[HeldBox]
) -> dict[str, torch.Tensor]:
    """Allocate the bucket's full tensors on rank 0 and lay its own boxes into them.

    A tensor that one local shard covers whole is used where it lies, without a copy.
    """
    full: dict[str, torch.Tensor] = {}
    own = {(item.source.fqn, item.box.offsets): item for item in held if item.is_sent}
    for fqn in bucket.inputs:
        source = plan.sources[fqn]
        whole = own.get((fqn, source.boxes[0].offsets)) if len(source.boxes) == 1 else None
        if whole is not None:
            full[fqn] = whole.tensor.cpu()
            continue
        full[fqn] = torch.empty(source.spec.shape, dtype=getattr(torch, source.spec.dtype))
        for box in source.boxes:
            item = own.get((fqn, box.offsets))
            if item is not None:
                take_box(full[fqn], box).copy_(item.tensor)
    return full
