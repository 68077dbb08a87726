"""The straight line: request -> inspect -> plan -> gather, write, verify -> package -> publish."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .actor_config import check_actor_config
from .architectures import find_architecture
from .contracts import Transport
from .errors import MergeError, PlanError
from .files import sha256_file
from .gather import gather_bucket, prepare_bucket
from .group import Group, local_rank, open_group, run_interruptibly
from .inspect_base import read_base
from .inspect_sources import OpenSources, hash_sources, inspect_sources
from .layouts import LAYOUTS
from .manifest import MANIFEST_NAME, make_manifest, producer_versions
from .package import PackagedFiles, package_base_files, write_index
from .plan import make_digest, make_plan
from .progress import Progress, log
from .publish import Staging, check_target, clear_dead_stagings
from .records import BaseModel, Bucket, MergePlan, MergeResult
from .request import ModelMergerConfig
from .transports import open_transport
from .validate import check_folder
from .verify import compute_outputs, verify_output_shard
from .wire import decode_base, encode_base
from .write import ShardWriter

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

    Ranks: collective. Memory: rank 0 holds about two buffers and the largest tensor.
    """
    with open_group(timeout=config.timeout, process_group=process_group) as group:
        run = MergeRun(config, group=group)
        return run_interruptibly(group, run.execute, clean_up=run.clean_up)


def inspect_checkpoint(config: ModelMergerConfig) -> dict[str, Any]:
    """Describe a checkpoint, and with a base the plan of its merge; no tensor is moved.

    Ranks: collective.
    """
    with open_group(timeout=config.timeout) as group:
        run = MergeRun(config, group=group)
        return run_interruptibly(group, run.describe, clean_up=run.clean_up)


@dataclass
class MergeRun:
    """One run on one rank; holds what must be released whatever happens."""

    config: ModelMergerConfig
    group: Group
    staging: Staging | None = None
    sources: OpenSources | None = None
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
        if self.sources is not None:
            self.sources.reader.close()

    def execute(self) -> MergeResult:
        """Walk the whole line. Ranks: collective."""
        try:
            return self._execute()
        finally:
            self.clean_up()

    def _execute(self) -> MergeResult:
        self.on_rank_0("check-target", self.check_new_target)
        with self.timed("inspect"):
            sources, base = self.inspect()
        with self.timed("plan"):
            plan = self.plan(sources, base)
        needed = sum(s.nbytes for s in plan.output_shards) + sum(f.nbytes for f in base.files)
        self.on_rank_0("check-space", lambda: self.check_target(needed))
        self.staging = self.on_rank_0("stage", lambda: Staging.create(self.target))
        self.log_plan(plan, needed=needed)
        hasher = Hasher(lambda: self.hash_inputs(sources, base))
        with self.timed("transport"):
            transport = self.group.prepare("open-transport", self.open_transport)
        try:
            with self.timed("merge"):
                weights = self.merge_shards(plan, sources, transport=transport)
        finally:
            transport.close()
        with self.timed("package"):
            packaged = self.on_rank_0("package", lambda: self.package(plan, base))
        with self.timed("hash"):
            own_hashes = self.group.prepare("hash-sources", hasher.join)
        hashes = self.group.exchange("hashes", json.dumps(own_hashes).encode())
        with self.timed("publish"):
            self.on_rank_0(
                "finish",
                lambda: self.finish(plan, base, sources, packaged, weights, hashes),
            )
            self.on_rank_0("publish", self.publish)
        return self.share_result(plan, sources, packaged, weights)

    @property
    def target(self) -> Path:
        """The target folder."""
        assert self.config.target_dir is not None
        return Path(self.config.target_dir)

    def check_new_target(self) -> None:
        """Clear what killed runs left of this target, then check it."""
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

    def inspect(self) -> tuple[OpenSources, BaseModel]:
        """Describe the checkpoint and the base, and compare their configs."""
        self.sources = sources = inspect_sources(self.config, group=self.group)
        base = self.inspect_base()
        actor = sources.inventory.actor_config
        if actor is not None:
            self.group.prepare("check-config", lambda: check_actor_config(actor, base))
        return sources, base

    def inspect_base(self) -> BaseModel:
        """Read the base on rank 0 and hand its description to all ranks."""
        assert self.config.base_model is not None
        folder = Path(self.config.base_model)

        def read() -> bytes:
            base = read_base(
                folder,
                component=self.config.component,
                output_format=self.config.output_format,
                trust_remote_code=self.config.trust_remote_code,
            )
            return encode_base(base)

        payload = self.on_rank_0("read-base", read) or b""
        return decode_base(self.group.exchange("base", payload)[0])

    def plan(self, sources: OpenSources, base: BaseModel) -> MergePlan:
        """Make the plan on every rank and compare the digests before a byte moves."""
        architecture = find_architecture(base.transformer_class)

        def make() -> MergePlan:
            architecture.check_base(base)
            return make_plan(
                sources.inventory,
                base=base,
                architecture=architecture,
                layout=LAYOUTS[self.config.output_format],
                config=self.config,
            )

        plan = self.group.prepare("plan", make)
        digests = self.group.exchange("plan-digest", make_digest(plan))

        def compare() -> None:
            if len(set(digests)) > 1:
                raise PlanError(
                    "plan-differs",
                    "the ranks made different plans",
                    hint="all ranks must run the same version with the same options",
                )

        self.group.prepare("compare-plans", compare)
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

    def hash_inputs(self, sources: OpenSources, base: BaseModel) -> dict[str, dict[str, str]]:
        """SHA256 of this rank's source files and, on rank 0, of the base's replaced weights."""
        own = hash_sources(Path(self.config.local_dir), sources.own_files, group=self.group)
        replaced = {}
        if self.group.rank == 0 and self.config.compare_base:
            folder = Path(str(self.config.base_model))
            for file in base.replaced:
                replaced[file.path] = sha256_file(
                    folder / file.path, on_progress=self.group.advance
                )
        return {"sources": own, "base": replaced}

    def open_transport(self) -> Transport:
        """Open the transport that `comm_backend` names."""
        return open_transport(
            self.config.comm_backend,
            group=self.group,
            buffer_nbytes=int(self.config.buffer_size),
            local_rank=local_rank(),
        )

    def merge_shards(
        self, plan: MergePlan, sources: OpenSources, *, transport: Transport
    ) -> dict[str, tuple[str, int]]:
        """Gather, write and verify output shard by output shard; returns path -> SHA256, size."""
        weights: dict[str, tuple[str, int]] = {}
        total = sum(shard.nbytes for shard in plan.output_shards)
        with Progress("merge", total_nbytes=total, enabled=self.talks) as progress:
            for number in range(len(plan.output_shards)):
                merger = ShardMerger(self, plan, number, progress)
                for bucket in (b for b in plan.buckets if b.output_shard == number):
                    merger.merge_bucket(bucket, sources=sources, transport=transport)
                done = self.on_rank_0(f"verify/{number}", merger.finish)
                if done is not None:
                    weights[plan.output_shards[number].path] = done
        return weights

    def package(self, plan: MergePlan, base: BaseModel) -> PackagedFiles:
        """Copy the frozen files and write the index. Ranks: rank 0 only."""
        assert self.staging is not None
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
        base: BaseModel,
        sources: OpenSources,
        packaged: PackagedFiles | None,
        weights: dict[str, tuple[str, int]],
        hashes: list[bytes],
    ) -> None:
        """Write index and manifest, and verify the whole folder. Ranks: rank 0 only."""
        assert self.staging is not None
        assert packaged is not None
        folder = self.staging.artifact_dir
        parts = [json.loads(payload) for payload in hashes]
        files = dict(packaged.files) | {path: sha for path, (sha, _) in weights.items()}
        if plan.index_path is not None:
            write_index(plan, folder)
            files[plan.index_path] = sha256_file(folder / plan.index_path)
        inventory = sources.inventory
        manifest = make_manifest(
            plan=plan,
            backend=inventory.backend,
            dtype=self.config.dtype,
            max_shard_size_bytes=int(self.config.max_shard_size),
            source_files={k: v for part in parts for k, v in part["sources"].items()},
            base_files={**packaged.base_files, **parts[0]["base"]},
            files=files,
            file_sizes={path: (folder / path).stat().st_size for path in files},
            source_model_config={
                "sha256": inventory.actor_config_sha256,
                "logical_path": "huggingface/config.json",
            },
            trained_component=base.component,
            config_transform_files=list(packaged.config_transform_files),
            left_out=list(base.left_out),
            structure_checks={"model_class_check": base.model_class_check},
            versions=producer_versions(),
            dtype_changes=dict(plan.dtype_changes),
        )
        from .files import write_json

        write_json(folder / MANIFEST_NAME, manifest)
        check_folder(folder, known_sha256=files)

    def publish(self) -> None:
        """Rename the staging folder onto the target. Ranks: rank 0 only."""
        assert self.staging is not None
        self.staging.publish()

    def share_result(
        self,
        plan: MergePlan,
        sources: OpenSources,
        packaged: PackagedFiles | None,
        weights: dict[str, tuple[str, int]],
    ) -> MergeResult:
        """Hand rank 0's result to all ranks."""
        payload = b""
        if packaged is not None:
            result = MergeResult(
                output_dir=str(self.target),
                manifest_path=str(self.target / MANIFEST_NAME),
                artifact_type=plan.artifact_type,
                architecture=plan.architecture,
                num_tensors=sum(len(shard.tensors) for shard in plan.output_shards),
                num_files=len(packaged.files) + len(weights) + (plan.index_path is not None),
                nbytes=sum(shard.nbytes for shard in plan.output_shards),
                seconds=self.seconds,
                notes=(*plan.notes, *sources.inventory.notes),
            )
            payload = json.dumps(asdict(result)).encode()
        data = json.loads(self.group.exchange("result", payload)[0])
        self.group.agree("end")
        return MergeResult(**{**data, "notes": tuple(data["notes"])})

    def describe(self) -> dict[str, Any]:
        """Describe the checkpoint, and the plan when there is a base. Ranks: collective."""
        try:
            if self.config.base_model is None:
                self.sources = inspect_sources(self.config, group=self.group)
                plan = None
            else:
                sources, base = self.inspect()
                plan = self.plan(sources, base)
            assert self.sources is not None
            report = describe_inventory(self.sources)
            if plan is not None:
                report["plan"] = describe_plan(plan)
            self.group.agree("end")
            return report
        finally:
            self.clean_up()


@dataclass
class ShardMerger:
    """Gathers, writes and verifies one output shard."""

    run: MergeRun
    plan: MergePlan
    number: int
    progress: Progress
    writer: ShardWriter | None = None
    source_digests: dict[str, Any] = field(default_factory=dict)
    output_digests: dict[str, bytes] = field(default_factory=dict)

    def merge_bucket(self, bucket: Bucket, *, sources: OpenSources, transport: Transport) -> None:
        """Bring one bucket to rank 0, compute its output tensors and append them to the file.

        Ranks: collective.
        """
        group = self.run.group
        name = f"bucket/{bucket.index}"
        held = group.prepare(
            name, lambda: prepare_bucket(self.plan, bucket, reader=sources.reader, group=group)
        )
        gathered = gather_bucket(self.plan, bucket, held=held, transport=transport, group=group)
        if gathered is None:
            return
        self.source_digests.update(gathered.digests)
        shard = self.plan.output_shards[self.number]
        if self.writer is None:
            assert self.run.staging is not None
            path = self.run.staging.artifact_dir / shard.path
            path.parent.mkdir(exist_ok=True)
            self.writer = ShardWriter(path, output_shard=shard, group=group)
        for output, result, digest in compute_outputs(self.plan, bucket, gathered):
            if digest is not None:
                self.output_digests[output.name] = digest
            self.writer.write(result)
            self.progress.advance(result.nbytes)

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
            group=self.run.group,
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


def describe_inventory(sources: OpenSources) -> dict[str, Any]:
    """What the checkpoint folder holds, as JSON-ready data."""
    inventory = sources.inventory
    tensors = {shard.fqn: shard for shard in inventory.shards}
    dtypes: dict[str, int] = {}
    for shard in tensors.values():
        dtypes[shard.dtype] = dtypes.get(shard.dtype, 0) + 1
    return {
        "backend": inventory.backend,
        "world_size": inventory.world_size,
        "files": {file.path: file.nbytes for file in inventory.files},
        "num_tensors": len(tensors),
        "num_sharded_tensors": len({s.fqn for s in inventory.shards if not s.is_whole_copy}),
        "dtypes": dtypes,
        "actor_class": (inventory.actor_config or {}).get("_class_name"),
        "notes": list(inventory.notes),
    }


def describe_plan(plan: MergePlan) -> dict[str, Any]:
    """What a merge would do, as JSON-ready data."""
    return {
        "artifact_type": plan.artifact_type,
        "architecture": plan.architecture,
        "output_files": {shard.path: shard.nbytes for shard in plan.output_shards},
        "num_tensors": sum(len(shard.tensors) for shard in plan.output_shards),
        "num_buckets": len(plan.buckets),
        "dtype_changes": {name: list(pair) for name, pair in plan.dtype_changes.items()},
        "notes": list(plan.notes),
    }


__all__ = ["MergeError", "inspect_checkpoint", "merge_model"]
