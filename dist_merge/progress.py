"""Progress and log lines of one phase: a bar on a terminal, else plain lines, on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Bar of one phase.

    Args:
        title: Name of the phase.
        total_nbytes: Bytes to handle, for the bar.
        enabled: Off on ranks other than 0 and with `quiet`.
    """

    def __init__(self, title: str, *, total_nbytes: int, enabled: bool) -> None:
        self.title = title
        self._enabled = enabled
        self._start = time.monotonic()
        self._done = 0
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_nbytes, desc=title, unit="B", unit_scale=True, file=sys.stderr
            )

    def advance(self, nbytes: int) -> None:
        """Count bytes."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._enabled and kind is None:
            seconds = time.monotonic() - self._start
            log(f"{self.title}: {self._done / 2**20:.1f} MiB in {seconds:.1f} s")


def log(text: str, *, enabled: bool = True) -> None:
    """Write one line to stderr."""
    if enabled:
        print(f"[dist_merge] {text}", file=sys.stderr, flush=True)
