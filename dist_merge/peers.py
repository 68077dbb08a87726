"""What one rank knows of the others: who they are, and whether they are alive and moving."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from .errors import MergeError, PeerError

BEAT_SECONDS = 0.5
# A rank whose watcher thread says nothing for this long is gone or stopped.
SILENCE_SECONDS = 20.0


def process_identity() -> dict[str, Any]:
    """Host, pid and start time of this process: enough for a same-host peer to see it die."""
    return {
        "host": f"{socket.gethostname()}/{_read_text('/proc/sys/kernel/random/boot_id')}"
        f"/{_read_link('/proc/self/ns/pid')}",
        "pid": os.getpid(),
        "start": process_start(os.getpid()),
    }


def process_start(pid: int) -> str | None:
    """Start time of a live process in clock ticks since boot; None when dead or a zombie."""
    stat = _read_text(f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return None
    return fields[19]


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


class Peers:
    """The other ranks, as their heartbeats in the store show them."""

    def __init__(self, rank: int, size: int, identity: dict[str, Any], *, timeout: float) -> None:
        self.others = [other for other in range(size) if other != rank]
        self.identity = identity
        self.timeout = timeout
        self.beats: dict[int, dict[str, Any]] = {}
        self.seen: dict[int, tuple[Any, float]] = {}
        self.moved: dict[int, tuple[int, float]] = {}
        self.started = time.monotonic()

    def check(self, store: Any) -> MergeError | None:
        """Return the error of the first rank that is dead, silent or stuck."""
        now = time.monotonic()
        for rank in self.others:
            if not store.check([f"beat/{rank}"]):
                if now - self.started > self.timeout:
                    return PeerError(
                        "peer-timeout",
                        f"rank {rank} did not join within {self.timeout:.0f} s",
                        rank=rank,
                    )
                continue
            beat = json.loads(store.get(f"beat/{rank}"))
            if beat.get("left"):
                continue
            error = self._check_one(rank, beat, now)
            # The rank may have left between its last heartbeat and its end.
            if error is not None and not json.loads(store.get(f"beat/{rank}")).get("left"):
                return error
        return None

    def explain_lost_store(self) -> MergeError:
        """Name the dead rank that held the store, where it can be seen from here."""
        time.sleep(BEAT_SECONDS)  # a dying process is not gone at once
        dead = [rank for rank, beat in self.beats.items() if self._is_dead(beat)]
        if dead:
            return self._make_death(dead[0])
        return PeerError(
            "peer-lost",
            "the store through which the ranks talk is gone: its process ended",
            hint="it lives in the job's first rank or its launcher: look at that machine",
        )

    def _is_dead(self, beat: dict[str, Any]) -> bool:
        same_host = beat["host"] == self.identity["host"] and beat["start"] is not None
        return same_host and process_start(beat["pid"]) != beat["start"]

    def _make_death(self, rank: int) -> MergeError:
        return PeerError(
            "peer-died",
            f"rank {rank} ended without a word: it was killed or crashed",
            rank=rank,
            hint="look for an out-of-memory kill (SIGKILL), or a file that was cut short while it "
            "was read (SIGBUS); a target that is there is complete",
        )

    def _check_one(self, rank: int, beat: dict[str, Any], now: float) -> MergeError | None:
        self.beats[rank] = beat
        if self._is_dead(beat):
            return self._make_death(rank)
        if self.seen.get(rank, (None, now))[0] != beat["beat"]:
            self.seen[rank] = (beat["beat"], now)
        if now - self.seen[rank][1] > SILENCE_SECONDS:
            return PeerError(
                "peer-timeout",
                f"rank {rank} gave no sign of life for {SILENCE_SECONDS:.0f} s",
                rank=rank,
                hint="its host or process is stopped or cut off",
            )
        mark = -1 if beat["waiting"] else beat["progress"]
        if mark == -1 or self.moved.get(rank, (None, now))[0] != mark:
            self.moved[rank] = (mark, now)
        if now - self.moved[rank][1] > self.timeout:
            return PeerError(
                "peer-timeout",
                f"rank {rank} made no progress for {self.timeout:.0f} s",
                rank=rank,
                hint="raise --timeout if its disk is only slow",
            )
        return None
