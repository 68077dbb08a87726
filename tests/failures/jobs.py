"""Start a merge of several ranks with a fault in it, and wait for its end."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dist_merge.peers import process_start
from tests.helpers.launch import ROOT, make_environment, torchrun_command

from .points import Fault
from .rank_process import run_rank

PRELOADED = ["__main__", "tests.failures.rank_process"]
LONGEST_SECONDS = 120.0


@dataclass(frozen=True)
class Ended:
    """How a job ended; `seconds` from the fault to the end of the last process.

    `codes` are those of the ranks, or torchrun's alone. `alive` are processes that outlived it.
    """

    codes: tuple[int | None, ...]
    is_struck: bool
    seconds: float
    alive: tuple[int, ...]
    log: str


class Launcher:
    """Starts jobs; `is_in_process` skips torchrun and its start-up time."""

    def __init__(self, *, is_in_process: bool) -> None:
        self.is_in_process = is_in_process
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def run(
        self,
        arguments: Sequence[object],
        *,
        size: int,
        fault: Fault | None,
        notes: Path,
        holds_store: bool = True,
    ) -> Ended:
        """Run one job; with `holds_store` the store outlives rank 0, as under torchrun."""
        variables = {"SOAK_NOTES": str(notes), "SOAK_FAULT": fault.encode() if fault else ""}
        texts = [str(part) for part in arguments]
        start = time.time()
        if self.is_in_process:
            codes, log = self._run_children(texts, size, variables, notes, holds_store)
        else:
            codes, log = self._run_torchrun(texts, size, variables)
        alive = wait_for_end([int(p.stem) for p in notes.glob("*.pid")], seconds=0.5)
        mark = notes / "mark"
        since = float(mark.read_text()) if mark.exists() else start
        return Ended(codes, mark.exists(), time.time() - since, alive, log)

    def _run_torchrun(
        self, arguments: list[str], size: int, variables: dict[str, str]
    ) -> tuple[tuple[int | None, ...], str]:
        command = torchrun_command("tests.failures.rank_process", arguments, nproc=size)
        with subprocess.Popen(
            command, cwd=ROOT, env={**make_environment(), **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as job:  # fmt: skip
            try:
                log, _ = job.communicate(timeout=LONGEST_SECONDS)
            except subprocess.TimeoutExpired:
                job.terminate()
                log, _ = job.communicate()
                return (None,), log
        return (job.returncode,), log

    def _run_children(
        self,
        arguments: list[str],
        size: int,
        variables: dict[str, str],
        notes: Path,
        holds_store: bool,
    ) -> tuple[tuple[int | None, ...], str]:
        limit = timedelta(seconds=60)
        store = None
        if holds_store:
            store = dist.TCPStore("127.0.0.1", 0, None, True, limit, False)
        common = {
            **variables,
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port if store is not None else free_port()),
            "TORCHELASTIC_USE_AGENT_STORE": str(holds_store),
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        log = notes / "log"
        ranks: list[Any] = []
        for rank in range(size):
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = self._context.Process(target=run_rank, args=(own, arguments, str(log)))
            process.start()
            ranks.append(process)
        deadline = time.monotonic() + LONGEST_SECONDS
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = tuple(process.exitcode for process in ranks)
        for process in ranks:
            if process.exitcode is None:
                process.kill()
        return codes, log.read_text() if log.exists() else ""


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_end(pids: Sequence[int], *, seconds: float) -> tuple[int, ...]:
    """Processes that are still there after this time; they are killed then."""
    deadline = time.monotonic() + seconds
    while True:
        alive = tuple(pid for pid in pids if process_start(pid) is not None)
        if not alive or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for pid in alive:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
    return alive
