"""Reopen what was written and compare it with the source slices it came from."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from .errors import VerificationError
from .gather import GatheredBucket, digest_tensor, iter_holders, take_box
from .group import Group
from .operations import evaluate, invert, is_invertible
from .records import Bucket, MergePlan, OutputShard, OutputTensor, PlannedBox, SourceTensor
from .safetensors_header import read_header


def compute_outputs(
    plan: MergePlan, bucket: Bucket, gathered: GatheredBucket
) -> Iterator[tuple[OutputTensor, torch.Tensor, bytes | None]]:
    """Compute the bucket's output tensors on rank 0.

    Where the operation loses bits (cast, fold), the file cannot be compared with the source
    slices later; then they are compared here, before the operation, and the digest of the result
    is handed on to be compared with the file.

    Raises:
        VerificationError: An assembled tensor differs from a source slice, or a cast overflows.
    """
    for fqn in bucket.inputs:
        check_replicas(plan.sources[fqn], gathered.digests[fqn])
    for output in bucket.tensors:
        digest = None
        if not is_invertible(output.expression):
            for fqn in output.inputs:
                check_boxes(
                    plan.sources[fqn],
                    gathered.tensors[fqn],
                    gathered.digests[fqn],
                    where="assembled in memory",
                )
        try:
            result = evaluate(output.expression, gathered.tensors)
        except VerificationError as error:
            error.where = f"tensor `{output.name}`"
            raise
        if not is_invertible(output.expression):
            digest = digest_tensor(result)
        yield output, result, digest


def check_replicas(source: SourceTensor, digests: Sequence[bytes]) -> None:
    """Check that all holders of one box took the same digest.

    Raises:
        VerificationError: Two holders disagree.
    """
    first: dict[tuple[int, ...], tuple[str, bytes]] = {}
    for (box, _, file, _, _), digest in zip(iter_holders(source), digests, strict=True):
        known_file, known = first.setdefault(box.offsets, (file, digest))
        if known != digest:
            raise VerificationError(
                "replica-differs",
                f"tensor `{source.fqn}`: two files hold different copies of the same values",
                where=f"`{known_file}` and `{file}`, {describe_box(box)}",
                hint="the files are from different steps or runs; save the checkpoint again",
            )


def check_boxes(
    source: SourceTensor, full: torch.Tensor, digests: Sequence[bytes], *, where: str
) -> None:
    """Compare every box of a full tensor with the digest taken from its source.

    Raises:
        VerificationError: A box differs.
    """
    for (box, _, file, _, is_sent), digest in zip(iter_holders(source), digests, strict=True):
        if is_sent and digest_tensor(take_box(full, box)) != digest:
            raise VerificationError(
                "value-differs",
                f"tensor `{source.fqn}` differs from its source, {where}",
                where=f"`{file}`, {describe_box(box)}",
                hint="a disk, memory or network fault, or a defect; run again and report it",
            )


def describe_box(box: PlannedBox) -> str:
    """Name a box for a message."""
    return f"offsets {list(box.offsets)}, sizes {list(box.sizes)}"


@contextmanager
def open_payload(path: Path) -> Iterator[torch.Tensor]:
    """Map a file and yield its bytes as a 1-D uint8 tensor; nothing may keep views of it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        try:
            yield whole
        finally:
            del whole


def verify_output_shard(
    plan: MergePlan,
    output_shard: OutputShard,
    *,
    path: Path,
    source_digests: Mapping[str, Sequence[bytes]],
    output_digests: Mapping[str, bytes],
    group: Group,
) -> int:
    """Reopen a written file and trace every value in it to its source slice.

    Args:
        plan: The plan.
        output_shard: What the file should hold.
        path: The written file.
        source_digests: Per source FQN, the digests of `iter_holders` order.
        output_digests: Per output name, the digest of a result that cannot be inverted.
        group: Told about progress.

    Returns:
        Size of the file in bytes.

    Raises:
        VerificationError: Header, shape, dtype or any value differs.
    """
    header = read_header(path)
    expected = {tensor.name: tensor.spec for tensor in output_shard.tensors}
    found = {name: entry.spec for name, entry in header.tensors.items()}
    if expected != found or dict(header.metadata) != dict(output_shard.metadata):
        raise VerificationError(
            "header-differs", "a written file has another header than planned", where=path.name
        )
    with open_payload(path) as whole:
        for output in output_shard.tensors:
            entry = header.tensors[output.name]
            if not entry.spec.nbytes:
                continue
            block = whole[header.nbytes + entry.begin : header.nbytes + entry.end]
            tensor = block.view(getattr(torch, entry.spec.dtype)).view(entry.spec.shape)
            verify_tensor(
                plan,
                output,
                tensor,
                source_digests=source_digests,
                output_digest=output_digests.get(output.name),
                where=f"read back from `{path.name}`",
            )
            group.advance(entry.spec.nbytes)
            del block, tensor
    return path.stat().st_size


def verify_tensor(
    plan: MergePlan,
    output: OutputTensor,
    tensor: torch.Tensor,
    *,
    source_digests: Mapping[str, Sequence[bytes]],
    output_digest: bytes | None,
    where: str,
) -> None:
    """Compare one tensor of the reopened file with its sources, or with its computed result."""
    if is_invertible(output.expression):
        recovered = invert(output.expression, tensor)
        for fqn in output.inputs:
            check_boxes(plan.sources[fqn], recovered[fqn], source_digests[fqn], where=where)
    elif output_digest is None or digest_tensor(tensor) != output_digest:
        raise VerificationError(
            "value-differs",
            f"tensor `{output.name}` differs from the value computed for it",
            where=where,
            hint="a disk or memory fault, or a defect; run again and report it",
        )
