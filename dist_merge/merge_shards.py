"""The heart of a merge: gather, operate, write and verify, output shard by output shard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .adapters.watch import AdapterWatch
from .contracts import SourceReader, Transport
from .files import make_parents
from .gather import gather_bucket, prepare_bucket
from .group import Group
from .progress import Progress
from .records import Bucket, MergePlan
from .verify import compute_outputs, verify_output_shard
from .write import ShardWriter

T = TypeVar("T")


def merge_shards(
    plan: MergePlan,
    *,
    artifact_dir: Path | None,
    reader: SourceReader,
    transport: Transport,
    group: Group,
    progress: Progress,
    watch: AdapterWatch | None = None,
) -> dict[str, tuple[str, int]]:
    """Gather, write and verify output shard by output shard.

    Args:
        plan: The plan.
        artifact_dir: Where rank 0 writes; None on other ranks.
        reader: This rank's opened sources.
        transport: Carries boxes to rank 0.
        group: The ranks.
        progress: Told about written bytes.
        watch: On rank 0, looks at an adapter's values as they pass.

    Returns:
        On rank 0 the written files: path -> SHA256, size in bytes. Empty on other ranks.

    Ranks: collective.
    """
    weights: dict[str, tuple[str, int]] = {}
    for number, shard in enumerate(plan.output_shards):
        merger = ShardMerger(plan, number, artifact_dir, group, progress, watch)
        try:
            for bucket in (b for b in plan.buckets if b.output_shard == number):
                merger.merge_bucket(bucket, reader=reader, transport=transport)
            finish = merger.finish if group.rank == 0 else nothing
            done = group.prepare(f"verify/{number}", finish)
        finally:
            merger.close()
        if done is not None:
            weights[shard.path] = done
    return weights


def nothing() -> None:
    """What the other ranks do while rank 0 verifies."""


@dataclass
class ShardMerger:
    """Gathers, writes and verifies one output shard."""

    plan: MergePlan
    number: int
    artifact_dir: Path | None
    group: Group
    progress: Progress
    watch: AdapterWatch | None = None
    writer: ShardWriter | None = None
    source_digests: dict[str, Any] = field(default_factory=dict)
    output_digests: dict[str, bytes] = field(default_factory=dict)

    def merge_bucket(self, bucket: Bucket, *, reader: SourceReader, transport: Transport) -> None:
        """Bring one bucket to rank 0, compute its output tensors and append them to the file.

        Ranks: collective.
        """
        group = self.group
        name = f"bucket/{bucket.index}"
        held = group.prepare(
            name, lambda: prepare_bucket(self.plan, bucket, reader=reader, group=group)
        )
        gathered = gather_bucket(self.plan, bucket, held=held, transport=transport, group=group)
        if gathered is None:
            return
        self.source_digests.update(gathered.digests)
        shard = self.plan.output_shards[self.number]
        if self.watch is not None:
            self.watch.see_sources(gathered.tensors)
        if self.writer is None:
            assert self.artifact_dir is not None
            path = make_parents(self.artifact_dir, shard.path)
            self.writer = ShardWriter(path, output_shard=shard, group=group)
        for output, result, digest in compute_outputs(self.plan, bucket, gathered):
            if digest is not None:
                self.output_digests[output.name] = digest
            if self.watch is not None and not shard.is_adapter:
                self.watch.see_output(output, result, gathered.tensors)
            self.writer.write(result)
            self.progress.advance(result.nbytes)

    def close(self) -> None:
        """Close the file; idempotent. A network disk keeps a deleted file that is still open."""
        if self.writer is not None:
            self.writer.close()

    def finish(self) -> tuple[str, int]:
        """Sync the file, reopen it and compare it with its sources. Ranks: rank 0 only."""
        assert self.writer is not None
        sha256 = self.writer.finish()
        nbytes = verify_output_shard(
            self.plan,
            self.plan.output_shards[self.number],
            path=self.writer.path,
            source_digests=self.source_digests,
            output_digests=self.output_digests,
            group=self.group,
        )
        return sha256, nbytes


class Hasher:
    """Runs a hashing job beside the gather; `join` returns its result or raises its error."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._thread.start()

    def _run(self, job: Callable[[], Any]) -> None:
        try:
            self._result = job()
        except BaseException as error:
            self._error = error

    def join(self) -> Any:
        """Wait for the job."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
