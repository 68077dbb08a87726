"""The heart of a merge: gather bucket by bucket, while rank 0 writes and verifies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .adapters.watch import AdapterWatch
from .contracts import SourceReader, Transport
from .gather import HeldBox, gather_bucket, prepare_bucket
from .group import Group
from .output_pipeline import OutputPipeline
from .progress import Progress
from .records import Bucket, MergePlan

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
    pipeline = None
    if group.rank == 0:
        assert artifact_dir is not None
        pipeline = OutputPipeline(
            plan, artifact_dir=artifact_dir, group=group, progress=progress, watch=watch
        )
    try:
        for bucket in plan.buckets:
            held = group.prepare(
                f"bucket/{bucket.index}",
                partial(prepare, plan, bucket, reader=reader, group=group, pipeline=pipeline),
            )
            gathered = gather_bucket(plan, bucket, held=held, transport=transport, group=group)
            if pipeline is not None and gathered is not None:
                pipeline.put(bucket, gathered)
            del held, gathered
        return group.prepare("verify", lambda: pipeline.finish() if pipeline is not None else {})
    finally:
        if pipeline is not None:
            pipeline.close()


def prepare(
    plan: MergePlan,
    bucket: Bucket,
    *,
    reader: SourceReader,
    group: Group,
    pipeline: OutputPipeline | None,
) -> list[HeldBox]:
    """Prepare a bucket, unless what was gathered before has failed."""
    if pipeline is not None:
        pipeline.check()
    return prepare_bucket(plan, bucket, reader=reader, group=group)


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
