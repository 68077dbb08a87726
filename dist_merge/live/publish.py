"""Publish a model from inside its training job: `publish_model` and `publish_model_async`."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import Any

from ..errors import MergeError, as_merge_error
from ..group import open_members
from ..job import run_interruptibly
from ..membership import Membership, join_ranks
from ..records import MergeResult
from ..request import LIVE, ModelMergerConfig
from ..run import MergeRun
from ..sources.pieces import Piece
from .model import LiveModel, read_live_model
from .source import LiveInput, list_pieces, take_snapshot


def publish_model(
    model: Any,
    *,
    base_model: Any,
    target_dir: Any,
    process_group: Any = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_configs: Mapping[str, Any] | None = None,
    **options: Any,
) -> MergeResult:
    """Publish the model that is being trained; every rank calls it at the same point.

    Args:
        model: FSDP2, FSDP1, HSDP, tensor-parallel, DDP, compiled, accelerate-prepared, PEFT or
            plain module, or a state dict of DTensors. It is not changed.
        base_model: The base pipeline, or lone transformer; only rank 0 reads it.
        target_dir: Output folder, the same on all ranks; must not exist. Only rank 0 writes it.
        process_group: Ranks that take part; the default group when None. The model's tensors
            must lie on these ranks alone.
        model_config: Config the model was built from, with `_class_name`; needed with a state
            dict, else the module's own.
        adapter_configs: Adapter name -> PEFT LoraConfig, for a state dict with adapters.
        **options: Those of `ModelMergerConfig`: output_format, component, dtype, adapter_name,
            fuse_lora, max_shard_size, buffer_size, timeout, quiet, and so on.

    Returns:
        Output folder, manifest path, counts; the same on every rank.

    Raises:
        MergeError: The first cause of any rank. No target is left; training may go on.

    Ranks: collective. Memory: as `merge_model`; on a GPU one bucket is copied to the host.
    """
    live = read_live_model(model, model_config=model_config, adapter_configs=adapter_configs)
    config = make_config(base_model, target_dir, options)
    return run_publish(config, live, members=join(process_group, target_dir), snapshot=None)


class PublishHandle:
    """A publish that goes on while training does."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: MergeResult | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the publish has ended, well or not."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> MergeResult:
        """Wait for the end.

        Args:
            timeout: Seconds to wait; for ever when None.

        Raises:
            MergeError: The first cause of any rank.
            TimeoutError: The publish still runs after `timeout`.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the publish still runs after {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def publish_model_async(
    model: Any,
    *,
    base_model: Any,
    target_dir: Any,
    process_group: Any = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_configs: Mapping[str, Any] | None = None,
    **options: Any,
) -> PublishHandle:
    """Copy this rank's shards to host memory, return, and publish while training goes on.

    Arguments as for `publish_model`. Several publishes may run at once if every rank starts them
    in the same order. A process that ends waits for its publishes.

    Returns:
        Handle; a failure of any rank is raised by its `result()` on every rank.

    Ranks: collective. Memory: one copy of the local shards until the publish ends.
    """
    live = read_live_model(model, model_config=model_config, adapter_configs=adapter_configs)
    config = make_config(base_model, target_dir, options)
    members = join(process_group, target_dir)
    handle = PublishHandle()
    snapshot: list[Piece] | MergeError
    try:
        snapshot = take_snapshot(list_pieces(live.state))
    except Exception as error:
        # The other ranks are on their way; they must hear of it.
        snapshot = as_merge_error(error, step="snapshot")

    def run() -> None:
        try:
            handle._result = run_publish(config, live, members=members, snapshot=snapshot)
        except BaseException as error:
            handle._error = error
        finally:
            handle._done.set()

    # Not a daemon: the interpreter waits for it, so a publish is never cut off by a normal exit.
    threading.Thread(target=run, name="dist_merge-publish", daemon=False).start()
    return handle


def join(process_group: Any, target_dir: Any) -> Membership:
    """Meet the ranks that publish to the same target."""
    tag = hashlib.sha256(str(target_dir).encode()).hexdigest()[:16]
    return join_ranks(process_group, tag=f"/{tag}")


def make_config(base_model: Any, target_dir: Any, options: Mapping[str, Any]) -> ModelMergerConfig:
    """Options of a publish."""
    return ModelMergerConfig(backend=LIVE, base_model=base_model, target_dir=target_dir, **options)


def run_publish(
    config: ModelMergerConfig,
    live: LiveModel,
    *,
    members: Membership,
    snapshot: list[Piece] | MergeError | None,
) -> MergeResult:
    """Run the straight line on a live model. Ranks: collective."""
    source = LiveInput(live, config.adapter_name, snapshot)
    with open_members(members, timeout=config.timeout) as group:
        run = MergeRun(config, group=group, source=source)
        return run_interruptibly(group, run.execute, clean_up=run.clean_up)
