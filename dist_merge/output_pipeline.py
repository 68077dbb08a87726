"""Rank 0's second thread: computes, writes and verifies what the job thread has gathered.

While one bucket is written and hashed, the next is on its way; while a finished file is read back,
the next one's buckets arrive. At most one bucket waits.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .adapters.watch import AdapterWatch
from .files import make_parents
from .gather import GatheredBucket
from .group import Group
from .progress import Progress
from .records import Bucket, MergePlan
from .verify import compute_outputs, verify_output_shard
from .write import ShardWriter

# Longest wait for the thread to notice that the run was stopped.
STOP_SECONDS = 10.0


@dataclass
class ShardMerger:
    """Writes and verifies one output shard."""

    plan: MergePlan
    number: int
    artifact_dir: Path
    group: Group
    progress: Progress
    watch: AdapterWatch | None = None
    writer: ShardWriter | None = None
    source_digests: dict[str, Any] = field(default_factory=dict)
    output_digests: dict[str, bytes] = field(default_factory=dict)

    def write(self, bucket: Bucket, gathered: GatheredBucket) -> None:
        """Compute the bucket's output tensors and append them to the file."""
        self.source_digests.update(gathered.digests)
        shard = self.plan.output_shards[self.number]
        if self.watch is not None:
            self.watch.see_sources(gathered.tensors)
        if self.writer is None:
            path = make_parents(self.artifact_dir, shard.path)
            self.writer = ShardWriter(path, output_shard=shard, group=self.group)
        for output, result, digest in compute_outputs(self.plan, bucket, gathered):
            if digest is not None:
                self.output_digests[output.name] = digest
            if self.watch is not None and not shard.is_adapter:
                self.watch.see_output(output, result, gathered.tensors)
            self.writer.write(result)
            self.progress.advance(result.nbytes)

    def finish(self) -> tuple[str, int]:
        """Sync the file, reopen it and compare it with its sources; returns SHA256 and size."""
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

    def close(self) -> None:
        """Close the file; idempotent. A network disk keeps a deleted file that is still open."""
        if self.writer is not None:
            self.writer.close()


class OutputPipeline:
    """Takes gathered buckets in the plan's order, in a thread of its own.

    Ranks: rank 0 only. Memory: the bucket in work, and one that waits.
    """

    def __init__(
        self,
        plan: MergePlan,
        *,
        artifact_dir: Path,
        group: Group,
        progress: Progress,
        watch: AdapterWatch | None,
    ) -> None:
        self._plan = plan
        self._group = group
        self._artifact_dir = artifact_dir
        self._progress = progress
        self._watch = watch
        self._files: dict[str, tuple[str, int]] = {}
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._queue: queue.Queue[tuple[Bucket, GatheredBucket] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, name="dist_merge-output", daemon=True)
        self._thread.start()

    def put(self, bucket: Bucket, gathered: GatheredBucket) -> None:
        """Hand over a bucket; waits while another one waits."""
        self._put((bucket, gathered))

    def check(self) -> None:
        """Raise what went wrong in the thread so far."""
        if self._error is not None:
            raise self._error

    def finish(self) -> dict[str, tuple[str, int]]:
        """Wait for the last file; returns path -> SHA256, size in bytes.

        Raises:
            MergeError: What went wrong with any file.
        """
        self._put(None)
        while self._thread.is_alive():
            self._thread.join(0.1)
            self._group.check()
        self.check()
        return self._files

    def close(self) -> None:
        """Stop the thread, which may be in the middle of a file; idempotent."""
        self._stopped.set()
        self._thread.join(STOP_SECONDS)

    def _put(self, item: tuple[Bucket, GatheredBucket] | None) -> None:
        while self._error is None:
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                self._group.check()

    def _take(self) -> tuple[Bucket, GatheredBucket] | None:
        while not self._stopped.is_set():
            try:
                return self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
        return None

    def _run(self) -> None:
        merger: ShardMerger | None = None
        try:
            while (item := self._take()) is not None:
                bucket, gathered = item
                del item
                if merger is not None and merger.number != bucket.output_shard:
                    self._finish(merger)
                    merger = None
                merger = merger or self._start(bucket.output_shard)
                merger.write(bucket, gathered)
                del bucket, gathered
            if merger is not None and not self._stopped.is_set():
                self._finish(merger)
        except BaseException as error:
            # Also what is no Exception: a thread that ends without a word would hang the rest.
            self._error = error
        finally:
            if merger is not None:
                merger.close()

    def _start(self, number: int) -> ShardMerger:
        return ShardMerger(
            self._plan, number, self._artifact_dir, self._group, self._progress, self._watch
        )

    def _finish(self, merger: ShardMerger) -> None:
        self._files[self._plan.output_shards[merger.number].path] = merger.finish()
