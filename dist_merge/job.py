"""Run the straight line in a thread of its own, so that the main thread stays interruptible."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import PeerError, as_merge_error
from .group import Group
from .peers import BEAT_SECONDS, SILENCE_SECONDS

T = TypeVar("T")


def run_interruptibly(
    group: Group, job: Callable[[], T], *, clean_up: Callable[[], None], patience: float = 5.0
) -> T:
    """Run `job` in a thread while this thread waits, takes signals and watches the store.

    On a failure anywhere the job gets `patience` seconds to leave by itself; a thread that sits
    inside a transfer with a dead peer is then left behind (it holds no file), and `clean_up` runs
    here.

    Raises:
        MergeError: The first cause of any rank.
    """
    outcome: dict[str, Any] = {}
    done = threading.Event()

    def run() -> None:
        try:
            outcome["result"] = job()
        except BaseException as error:
            outcome["error"] = error
            if isinstance(error, Exception):
                group.report(as_merge_error(error, step="run"))
        finally:
            done.set()

    thread = threading.Thread(target=run, name="dist_merge-job", daemon=True)
    thread.start()
    try:
        while not done.wait(0.1):
            if group.stopped.is_set():
                break
            if group.silence() > SILENCE_SECONDS + 2 * BEAT_SECONDS:
                group.fail(
                    PeerError(
                        "peer-timeout",
                        f"no contact with the other ranks for {SILENCE_SECONDS:.0f} s",
                        rank=group.rank,
                        hint="rank 0 or the launcher is stopped or cut off",
                    )
                )
    except BaseException as raised:
        error = as_merge_error(raised, step="run") if isinstance(raised, Exception) else None
        group.report(error or PeerError("interrupted", "interrupted from the keyboard"))
    if not done.is_set() or "result" not in outcome:
        done.wait(patience)
        clean_up()
        cause = group.cause or as_merge_error(outcome["error"], step="run")
        raise cause from outcome.get("error")
    result: T = outcome["result"]
    return result
