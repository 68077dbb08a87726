"""The straight line: request -> inspect -> plan -> gather, write, verify -> package -> publish."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from .actor_config import check_actor_config
from .adapters.keys import sort_names
from .adapters.watch import AdapterWatch
from .base_reader import BaseReader, ReaderWithBase
from .contracts import Transport
from .describe import describe_inventory, describe_plan
from .errors import PlanError, UploadError
from .files import sha256_file
from .finish import finish_folder
from .group import Group, open_group
from .inspect_base import read_base
from .inspect_sources import OpenSources
from .job import run_interruptibly
from .layouts import LAYOUTS
from .merge_job import FileInput, Input, Job, MergedShards, inspect_adapter
from .merge_shards import Hasher, merge_shards
from .package import PackagedFiles, check_unchanged, package_base_files
from .plan import make_digest
from .progress import Progress, log
from .publish import Staging, check_inputs_apart, check_target, clear_dead_stagings
from .records import BaseModel, MergePlan, MergeResult
from .request import ModelMergerConfig
from .transports import open_transport
from .wire import decode_base, encode_base

T = TypeVar("T")


def merge_model(config: ModelMergerConfig, *, process_group: Any = None) -> MergeResult:
    """Merge a sharded checkpoint into a verified, published model folder.

    Args:
        config: All options.
        process_group: Ranks that take part; the default group when one is initialised, else the
            processes torchrun started, else this process alone.

    Returns:
        Output folder, manifest path, counts; the same on every rank.

    Raises:
        MergeError: The first cause of any rank. No target is left.

    Ranks: collective. Memory: rank 0 holds at most three buffers and the largest tensor.
    """
    with open_group(timeout=config.timeout, process_group=process_group) as group:
        run = MergeRun(config, group=group, source=FileInput(config))
        return run_interruptibly(group, run.execute, clean_up=run.clean_up)


def inspect_checkpoint(config: ModelMergerConfig) -> dict[str, Any]:
    """Describe a checkpoint, and with a base the plan of its merge; no tensor is moved.

    Ranks: collective.
    """
    with open_group(timeout=config.timeout) as group:
        run = MergeRun(config, group=group, source=FileInput(config))
        return run_interruptibly(group, run.describe, clean_up=run.clean_up)


@dataclass
class MergeRun:
    """One run on one rank; holds what must be released whatever happens."""

    config: ModelMergerConfig
    group: Group
    source: Input
    staging: Staging | None = None
    sources: OpenSources | None = None
    base_reader: BaseReader | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def talks(self) -> bool:
        """Whether this rank writes progress to stderr."""
        return self.group.rank == 0 and not self.config.quiet

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of a step to the result's `seconds`."""
        start = time.monotonic()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - start, 3)

    def on_rank_0(self, step: str, action: Callable[[], T]) -> T | None:
        """Run `action` on rank 0 while the others wait for its outcome. Ranks: collective."""
        return self.group.prepare(step, lambda: action() if self.group.rank == 0 else None)

    def clean_up(self) -> None:
        """Remove the staging folder and close the sources; idempotent."""
        if self.staging is not None:
            self.staging.discard()
            cause = self.group.cause
            if (
                self.staging.is_published
                and cause is not None
                and not isinstance(cause, UploadError)
            ):
                cause.hint = "the error came after publishing: the target is complete"
        if self.sources is not None:
            self.sources.reader.close()
        if self.base_reader is not None:
            self.base_reader.close()

    def execute(self) -> MergeResult:
        """Walk the whole line. Ranks: collective."""
        try:
            return self._execute()
        finally:
            self.clean_up()

    def _execute(self) -> MergeResult:
        self.on_rank_0("check-target", self.check_new_target)
        if self.config.hf_upload_path is not None:
            self.on_rank_0("check-hub", self.check_hub)
        with self.timed("inspect"):
            job = self.inspect()
        with self.timed("plan"):
            plan = self.plan(job)
        needed = sum(s.nbytes for s in plan.output_shards) + job.copied_nbytes
        self.on_rank_0("check-space", lambda: self.check_target(needed))
        self.staging = self.on_rank_0("stage", lambda: Staging.create(self.target))
        self.log_plan(plan, needed=needed)
        hasher = Hasher(lambda: self.hash_inputs(job))
        with self.timed("transport"):
            transport = self.group.prepare("open-transport", self.open_transport)
        try:
            with self.timed("merge"):
                merged = self.merge_shards(plan, job, transport=transport)
        finally:
            transport.close()
        with self.timed("package"):
            packaged = self.on_rank_0("package", lambda: self.package(job))
        with self.timed("hash"):
            own_hashes = self.group.prepare("hash-sources", hasher.join)
            # The hashes may have been taken before the last values were read.
            self.group.prepare("recheck-inputs", lambda: self.recheck_inputs(job))
        hashes = self.group.exchange("hashes", json.dumps(own_hashes).encode())
        with self.timed("publish"):
            result = self.on_rank_0(
                "finish", lambda: self.finish(plan, job, packaged, merged, hashes)
            )
            self.on_rank_0("publish", self.publish)
        if self.config.hf_upload_path is not None:
            with self.timed("upload"):
                url = self.on_rank_0("upload", self.upload)
            result = None if result is None else replace(result, uploaded_to=url)
        return self.share_result(result)

    @property
    def target(self) -> Path:
        """The target folder."""
        assert self.config.target_dir is not None
        return Path(self.config.target_dir)

    def check_new_target(self) -> None:
        """Clear what killed runs left of this target, then check it."""
        if self.config.base_model is not None and self.config.local_dir is not None:
            check_inputs_apart(Path(self.config.local_dir), Path(self.config.base_model))
        self.notes += clear_dead_stagings(self.target)
        self.check_target(0)

    def check_target(self, needed_nbytes: int) -> None:
        """Refuse a target that exists, overlaps an input, or does not fit the disk."""
        inputs = [self.config.local_dir, self.config.base_model, self.config.hf_model_config_path]
        check_target(
            self.target,
            inputs=[Path(path) for path in inputs if path is not None],
            needed_nbytes=needed_nbytes,
        )

    def inspect(self) -> Job:
        """Describe the checkpoint and what it is merged with, and compare their configs."""
        self.sources = sources = self.source.open(self.group)
        names = self.group.prepare(
            "sort-names",
            lambda: sort_names(shard.fqn for shard in sources.inventory.shards),
            is_shared=True,
        )
        settings = inspect_adapter(
            self.config, names, source=self.source, sources=sources, group=self.group
        )
        is_adapter_alone = names.is_lora_only and not self.config.fuse_lora
        base = self.inspect_base(is_needed=not is_adapter_alone)
        actor = sources.inventory.actor_config
        if actor is not None and base is not None:
            self.group.prepare(
                "check-config", lambda: check_actor_config(actor, base), is_shared=True
            )
        job = Job(self.config, sources, base, names, settings)
        if self.group.rank == 0 and base is not None:
            self.base_reader = BaseReader(Path(str(self.config.base_model)), base)
            if job.reads_base:
                reader = ReaderWithBase(sources.reader, self.base_reader)
                job.sources = self.sources = replace(sources, reader=reader)
        return job

    def inspect_base(self, *, is_needed: bool) -> BaseModel | None:
        """Read the base on rank 0 and hand its description to all ranks.

        An adapter alone needs no base; it is checked against one that is at hand.
        """

        def read() -> bytes:
            folder = self.config.base_model
            if is_needed:
                self.config.require("base_model")
            elif folder is None or not Path(folder).is_dir():
                return b""
            base = read_base(
                Path(str(folder)),
                component=self.config.component,
                output_format=self.config.output_format if is_needed else None,
                trust_remote_code=self.config.trust_remote_code,
            )
            return encode_base(base)

        payload = self.on_rank_0("read-base", read) or b""
        shared = self.group.exchange("base", payload)[0]
        return decode_base(shared) if shared else None

    def plan(self, job: Job) -> MergePlan:
        """Make the plan on every rank and compare the digests before a byte moves."""
        plan = self.group.prepare("plan", job.make_plan, is_shared=True)
        digests = self.group.exchange("plan-digest", make_digest(plan))

        def compare() -> None:
            if len(set(digests)) > 1:
                raise PlanError(
                    "plan-differs",
                    "the ranks made different plans",
                    hint="all ranks must run the same version with the same options",
                )

        self.group.prepare("compare-plans", compare, is_shared=True)
        return plan

    def log_plan(self, plan: MergePlan, *, needed: int) -> None:
        """Say what will be done."""
        output = sum(shard.nbytes for shard in plan.output_shards)
        log(
            f"plan: {sum(len(s.tensors) for s in plan.output_shards)} tensors, "
            f"{output / 2**20:.1f} MiB in {len(plan.output_shards)} file(s), "
            f"{len(plan.buckets)} bucket(s); {needed / 2**20:.1f} MiB of disk; "
            f"{self.group.size} rank(s)",
            enabled=self.talks,
        )
        notes = [*self.notes, *plan.notes]
        if self.sources is not None:
            notes += self.sources.inventory.notes
        if plan.dtype_changes:
            name, (old, new) = next(iter(plan.dtype_changes.items()))
            notes.append(
                f"{len(plan.dtype_changes)} tensors have another dtype than in the base, "
                f"for example `{name}`: {old} -> {new}"
            )
        for note in notes:
            log(f"note: {note}", enabled=self.talks)

    def hash_inputs(self, job: Job) -> dict[str, dict[str, str]]:
        """SHA256 of this rank's source files and, on rank 0, of the base's replaced weights."""
        own = job.sources.hash(self.group)
        replaced = {}
        if self.group.rank == 0 and job.base is not None and job.hashes_base:
            folder = Path(str(self.config.base_model))
            for file in job.base.replaced:
                replaced[file.path] = sha256_file(
                    folder / file.path, on_progress=self.group.advance
                )
                check_unchanged(folder, file)
        return {"sources": own, "base": replaced}

    def recheck_inputs(self, job: Job) -> None:
        """Raise when an input of this rank changed since the inspection."""
        job.sources.recheck()
        if self.group.rank == 0 and job.base is not None:
            read = job.base.replaced if job.hashes_base else ()
            for file in (*read, *([] if job.is_adapter_alone else job.base.files)):
                check_unchanged(Path(str(self.config.base_model)), file)

    def open_transport(self) -> Transport:
        """Open the transport that `comm_backend` names."""
        return open_transport(
            self.config.comm_backend,
            group=self.group,
            buffer_nbytes=int(self.config.buffer_size),
            device=self.sources.device if self.sources is not None else None,
        )

    def merge_shards(self, plan: MergePlan, job: Job, *, transport: Transport) -> MergedShards:
        """Gather, write and verify."""
        total = sum(shard.nbytes for shard in plan.output_shards)
        watch = None
        if plan.adapter is not None and self.group.rank == 0:
            compares = job.hashes_base and not job.reads_base and not job.is_adapter_alone
            watch = AdapterWatch(plan, plan.adapter, self.base_reader if compares else None)
        with Progress("merge", total_nbytes=total, enabled=self.talks) as progress:
            files = merge_shards(
                plan,
                artifact_dir=self.staging.artifact_dir if self.staging else None,
                reader=job.sources.reader,
                transport=transport,
                group=self.group,
                progress=progress,
                watch=watch,
            )

        def judge() -> list[str]:
            if watch is None:
                return []
            return watch.finish(allow_zeros=self.config.allow_suspicious_zeros)

        notes = self.group.prepare("check-adapter", judge)
        for note in notes:
            log(f"note: {note}", enabled=self.talks)
        return MergedShards(files, tuple(notes), watch.counts if watch is not None else {})

    def package(self, job: Job) -> PackagedFiles:
        """Copy the frozen files. Ranks: rank 0 only."""
        assert self.staging is not None
        base = job.base
        if base is None or job.is_adapter_alone:
            return PackagedFiles({}, {}, ())
        copies = LAYOUTS[self.config.output_format].copies(base)
        total = sum(file.nbytes for file in base.files if file.path in copies)
        with Progress("copy base", total_nbytes=total, enabled=self.talks) as progress:

            def advance(nbytes: int) -> None:
                self.group.advance(nbytes)
                progress.advance(nbytes)

            return package_base_files(
                base,
                Path(str(self.config.base_model)),
                copies=copies,
                artifact_dir=self.staging.artifact_dir,
                on_progress=advance,
            )

    def finish(
        self,
        plan: MergePlan,
        job: Job,
        packaged: PackagedFiles | None,
        merged: MergedShards,
        hashes: list[bytes],
    ) -> MergeResult:
        """Write configs, index and manifests, and verify the whole folder. Ranks: rank 0 only."""
        assert self.staging is not None
        assert packaged is not None
        folder = self.staging.artifact_dir
        parts = [json.loads(payload) for payload in hashes]
        manifest_path, num_files = finish_folder(
            folder,
            plan=plan,
            job=job,
            packaged=packaged,
            merged=merged,
            source_files={k: v for part in parts for k, v in part["sources"].items()},
            replaced_files=parts[0]["base"],
        )
        return MergeResult(
            output_dir=str(self.target),
            manifest_path=str(self.target / manifest_path),
            artifact_type=plan.artifact_type,
            architecture=plan.architecture,
            num_tensors=sum(len(shard.tensors) for shard in plan.output_shards),
            num_files=num_files,
            nbytes=sum(shard.nbytes for shard in plan.output_shards),
            seconds=self.seconds,
            notes=(*plan.notes, *merged.notes, *job.sources.inventory.notes),
        )

    def publish(self) -> None:
        """Rename the staging folder onto the target. Ranks: rank 0 only."""
        assert self.staging is not None
        self.staging.publish(confirm=self.group.confirm)

    def check_hub(self) -> None:
        """Refuse an upload that cannot work, before the merge. Ranks: rank 0 only."""
        from .upload import check_hub  # the hub's library is loaded where it is needed only

        note = check_hub()
        self.notes += [note] if note is not None else []

    def upload(self) -> str:
        """Upload the published target; returns the repository's address. Ranks: rank 0 only."""
        from .upload import upload_artifact

        log(f"published: {self.target}", enabled=self.talks)
        try:
            report = upload_artifact(
                self.target,
                str(self.config.hf_upload_path),
                private=self.config.private,
                base_model=self.config.base_model,
                is_checked=True,
                quiet=not self.talks,
                # Less than the other ranks' patience, so that this rank says what hangs.
                timeout=0.9 * self.config.timeout,
                on_progress=self.group.advance,
            )
        except UploadError as error:
            error.where = f"`{self.target}` is published and complete; only the upload failed"
            raise
        return report.url

    def share_result(self, result: MergeResult | None) -> MergeResult:
        """Hand rank 0's result to all ranks."""
        payload = b"" if result is None else json.dumps(asdict(result)).encode()
        data = json.loads(self.group.exchange("result", payload)[0])
        self.group.agree("end")
        return MergeResult(**{**data, "notes": tuple(data["notes"])})

    def describe(self) -> dict[str, Any]:
        """Describe the checkpoint, and the plan when there is a base. Ranks: collective."""
        try:
            if self.config.base_model is None:
                self.sources = self.source.open(self.group)
                plan = None
            else:
                plan = self.plan(self.inspect())
            assert self.sources is not None
            report = describe_inventory(self.sources)
            if plan is not None:
                report["plan"] = describe_plan(plan)
            self.group.agree("end")
            return report
        finally:
            self.clean_up()
