"""The ranks of one run: membership, agreement between steps, first cause, watching peers.

The control plane is a key-value store, never a collective: a rank that waits for others waits on
a store key in short intervals, so it notices a failure elsewhere within a fraction of a second,
has no fixed time limit, and stays interruptible. Process groups carry tensor bytes only
(`transports/`).

Three threads per rank: the caller's main thread waits and takes signals, a job thread walks the
straight line of `run.py`, a watcher thread publishes this rank's heartbeat and reads the others'.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from .errors import MergeError, PeerError, as_merge_error
from .membership import Membership, join_ranks
from .peers import BEAT_SECONDS, Peers, process_identity

T = TypeVar("T")
CHUNK_NBYTES = 2**20
POLL_SECONDS = (0.0002, 0.02)
LEAVE_SECONDS = 3.0
# How long a failure that others may have caused waits for the cause itself.
CAUSE_SECONDS = 3.0


class Group:
    """The ranks of one run and what they agree on.

    Args:
        rank: Group rank of this process.
        size: Number of ranks.
        store: Key-value store all ranks share; None when there is one rank.
        timeout: Seconds without progress of an unfinished rank that end the run.
    """

    def __init__(self, *, rank: int, size: int, store: Any = None, timeout: float = 1800.0) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.progress = 0
        self.waiting = False
        self.stopped = threading.Event()
        self._stopping = threading.Event()
        # A client of our own: a trainer that waits in the store would block this run.
        self._shared_store = store
        self._store = _clone(store)
        self._cause: MergeError | None = None
        self._cause_lock = threading.Lock()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._last_contact = time.monotonic()
        if size > 1:
            self._watcher = threading.Thread(
                target=self._watch, name="dist_merge-watcher", daemon=True
            )
            self._watcher.start()

    def make_store(self, name: str) -> Any:
        """Return the run's store under a prefix of its own, for a process group."""
        return PrefixStore(name, self._store)

    @property
    def cause(self) -> MergeError | None:
        """First error of any rank, once known here."""
        return self._cause

    def advance(self, amount: int = 1) -> None:
        """Count progress, and leave at once when another rank has failed.

        Raises:
            MergeError: The first cause, when the run was stopped.
        """
        self.progress += amount
        self.check()

    def check(self) -> None:
        """Raise the first cause when the run was stopped."""
        if self._stopping.is_set():
            self.stopped.wait(2 * CAUSE_SECONDS)
        if self.stopped.is_set() and self._cause is not None:
            raise self._cause

    def confirm(self) -> None:
        """Ask the store once more, and raise the first cause when any rank has failed.

        For the step that cannot be taken back: the watcher asks only now and then.
        """
        if self.size > 1:
            self._op(self._adopt_cause)
        self.check()

    def prepare(self, step: str, action: Callable[[], T], *, is_shared: bool = False) -> T:
        """Run `action` here, then agree with all ranks that it worked everywhere.

        Args:
            step: Name of the step, the same on all ranks.
            action: What may fail.
            is_shared: The action is the same on all ranks, so its error is no single rank's.

        Ranks: collective; same steps in the same order on every rank.
        """
        error: MergeError | None = None
        result: T
        try:
            result = action()
        except Exception as raised:  # every kind of failure must reach the other ranks
            if isinstance(raised, MergeError) and raised is self._cause:
                raise
            error = as_merge_error(raised, step=step)
            error.__cause__ = raised
            if error.rank is None and self.size > 1 and not is_shared:
                error.rank = self.rank
        self.agree(step, error)
        return result

    def agree(self, step: str, error: MergeError | None = None) -> None:
        """Wait until every rank stands here; raise the first cause when any rank failed.

        Ranks: collective.
        """
        self.check()
        if error is not None:
            raise self.report(error, is_shared=True)
        if self.size == 1:
            return
        key = f"agree/{step}"
        if self._op(lambda: self._store.add(key, 1)) == self.size:
            self._set(f"{key}/done", b"1")
        self._wait(f"{key}/done")
        self._op(self._adopt_cause)
        self.check()

    def exchange(self, step: str, payload: bytes) -> list[bytes]:
        """Give every rank's `payload` to every rank, by rank.

        Ranks: collective. Memory: all payloads, compressed and plain.
        """
        if self.size == 1:
            return [payload]
        self.put(f"{step}/{self.rank}", payload)
        return [self.get(f"{step}/{rank}") for rank in range(self.size)]

    def put(self, name: str, payload: bytes) -> None:
        """Publish bytes under `name` for the other ranks."""
        packed = zlib.compress(payload, 1)
        chunks = [packed[i : i + CHUNK_NBYTES] for i in range(0, len(packed), CHUNK_NBYTES)]
        for index, chunk in enumerate(chunks):
            self._set(f"data/{name}/{index}", chunk)
        self._set(f"data/{name}", str(len(chunks)).encode())

    def get(self, name: str) -> bytes:
        """Wait for the bytes another rank published under `name`."""
        self._wait(f"data/{name}")
        count = int(self._get(f"data/{name}"))
        parts = [self._get(f"data/{name}/{index}") for index in range(count)]
        return zlib.decompress(b"".join(parts))

    def report(self, error: MergeError, *, is_shared: bool = False) -> MergeError:
        """Record `error` as the first cause unless there is one; return the first cause.

        An error that is not the same on all ranks gets this rank's number, if it has none.
        """
        if error.rank is None and self.size > 1 and not is_shared and self._cause is None:
            error.rank = self.rank
        if self.size > 1 and self._cause is None:
            if isinstance(error, PeerError):
                # A broken connection is seldom the cause, nor is a launcher that stops the others
                # of a dead rank: give the watcher time to find it, and go no further meanwhile.
                self._stopping.set()
                self.stopped.wait(CAUSE_SECONDS)
            try:
                text = json.dumps(error.to_dict())
                self._store.compare_set("cause", "", text)
                self._adopt_cause()
            except RuntimeError:
                pass  # the store is gone with the rank or launcher that held it
        self.fail(error)
        assert self._cause is not None
        return self._cause

    def close(self) -> None:
        """Stop watching and tell the others that this rank left on purpose.

        Rank 0 may hold the store, so it leaves last, unless the others are gone.
        """
        self._closing.set()
        if self._watcher is None:
            return
        self._watcher.join(2.0)
        try:
            self._store.set(f"beat/{self.rank}", json.dumps({"left": True}))
            deadline = time.monotonic() + LEAVE_SECONDS
            while self.rank == 0 and time.monotonic() < deadline and not self._all_left():
                time.sleep(0.01)
            if self.rank == 0:
                self._forget()
        except (RuntimeError, NotImplementedError, AttributeError):
            pass  # the store is gone with the rank or launcher that held it

    def _forget(self) -> None:
        """Delete the run's keys, so that a trainer that publishes often does not fill its store.

        The cause of a failure stays: a rank that comes too late must find it.
        """
        if self._all_left():
            for key in self._store.list_keys():
                if key != "cause":
                    self._store.delete_key(key)

    def _all_left(self) -> bool:
        """Whether every other rank left, or is the one that died."""
        dead = self._cause.rank if isinstance(self._cause, PeerError) else None
        return all(
            rank == dead or b"left" in self._store.get(f"beat/{rank}")
            for rank in range(1, self.size)
        )

    def fail(self, error: MergeError) -> None:
        """Stop this rank's run with `error`, unless it was stopped before."""
        with self._cause_lock:
            if self._cause is None:
                self._cause = error
        self.stopped.set()

    def _op(self, operation: Callable[[], T]) -> T:
        """Run one store operation; a store that is gone means that its holder is gone."""
        try:
            return operation()
        except RuntimeError as error:
            self.stopped.wait(2 * BEAT_SECONDS)  # the watcher knows better who is gone
            self.check()
            raise PeerError(
                "peer-lost",
                "the store through which the ranks talk is gone: its process ended",
                hint="it lives in the job's first rank or its launcher: look at that machine",
            ) from error

    def _set(self, key: str, value: bytes) -> None:
        self._op(lambda: self._store.set(key, value))

    def _get(self, key: str) -> bytes:
        value: bytes = self._op(lambda: self._store.get(key))
        return value

    def _wait(self, key: str) -> None:
        """Wait for `key` as long as no rank failed."""
        # Polled, not waited for in the store: a blocked store client would serve no one else.
        self.waiting = True
        pause, longest = POLL_SECONDS
        try:
            while not self._op(lambda: self._store.check([key])):
                self.stopped.wait(pause)
                self.check()
                pause = min(pause * 1.5, longest)
        finally:
            self.waiting = False

    def _adopt_cause(self, store: Any = None) -> None:
        store = store or self._store
        if self._cause is None and store.check(["cause"]):
            self.fail(MergeError.from_dict(json.loads(store.get("cause"))))

    def _watch(self) -> None:
        """Publish the heartbeat, adopt a first cause, notice dead, stopped or stuck ranks."""
        store = _clone(self._store)
        identity = process_identity()
        peers = Peers(self.rank, self.size, identity, timeout=self.timeout)
        while not self._closing.is_set():
            beat = {**identity, "beat": time.monotonic_ns(), "progress": self.progress}
            beat["waiting"] = self.waiting
            try:
                store.set(f"beat/{self.rank}", json.dumps(beat))
                self._adopt_cause(store)
                error = peers.check(store)
                if error is not None and self._cause is None and not self._closing.is_set():
                    store.compare_set("cause", "", json.dumps(error.to_dict()))
                    self._adopt_cause(store)
                self._last_contact = time.monotonic()
            except RuntimeError:
                if not self._closing.is_set():
                    self.fail(peers.explain_lost_store())
                return
            self._closing.wait(BEAT_SECONDS)

    def silence(self) -> float:
        """Seconds since the watcher last reached the store; 0 when there is nothing to watch."""
        return time.monotonic() - self._last_contact if self._watcher is not None else 0.0


@contextmanager
def open_members(members: Membership, *, timeout: float) -> Iterator[Group]:
    """Start watching the other ranks, and leave them at the end. Ranks: waits for nobody."""
    group = Group(rank=members.rank, size=members.size, store=members.store, timeout=timeout)
    try:
        yield group
    finally:
        group.close()


@contextmanager
def open_group(*, timeout: float, process_group: Any = None) -> Iterator[Group]:
    """Join the ranks of this run and leave them at the end. Ranks: waits for nobody."""
    with open_members(join_ranks(process_group), timeout=timeout) as group:
        yield group


def _clone(store: Any) -> Any:
    """A client of the same store with a connection of its own, where the kind of store has one."""
    try:
        return store.clone()
    except (RuntimeError, AttributeError, NotImplementedError):
        return store
