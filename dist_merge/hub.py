"""Calls to a model hub: watched while they run, their exceptions turned into ours."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from .errors import UploadError

T = TypeVar("T")
POLL_SECONDS = 0.2
DENIED = (401, 403)


def call_hub(
    what: str,
    action: Callable[[], T],
    *,
    timeout: float,
    folder: Path | None = None,
    on_progress: Callable[[], None] = lambda: None,
    hint: str | None = None,
) -> T:
    """Run one call of the hub's library in a thread of its own, and watch it.

    The library sets no time limit on a transfer, so a server that stops answering would hold the
    run for ever.

    Args:
        what: What the call does, for messages.
        action: The call.
        timeout: Seconds without progress.
        folder: Folder whose files it sends; reading on in one of them is progress.
        on_progress: Called whenever something moved; may raise to give up.
        hint: How to go on after a failure.

    Raises:
        UploadError: The call failed, or nothing moved for `timeout` seconds. A call that hangs is
            left behind in its thread.
    """
    outcome: dict[str, Any] = {}
    done = threading.Event()

    def run() -> None:
        try:
            outcome["result"] = action()
        except BaseException as error:
            outcome["error"] = error
        finally:
            done.set()

    threading.Thread(target=run, name="dist_merge-upload", daemon=True).start()
    positions, moved = read_positions(folder), time.monotonic()
    while not done.wait(POLL_SECONDS):
        found = read_positions(folder)
        if found != positions:
            positions, moved = found, time.monotonic()
            on_progress()
        elif time.monotonic() - moved > timeout:
            raise UploadError(
                "upload-stalled",
                f"nothing moved for {timeout:.0f} s while {what}",
                hint=hint,
            )
    on_progress()
    if "error" in outcome:
        raise make_error(outcome["error"], what=what, hint=hint) from outcome["error"]
    result: T = outcome["result"]
    return result


def read_positions(folder: Path | None) -> dict[str, str]:
    """Where this process stands in each file of `folder` that it has open; empty without /proc.

    This sees a transfer move whichever way the library sends the file.
    """
    if folder is None:
        return {}
    prefix = f"{folder.resolve()}{os.sep}"
    positions = {}
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for number in numbers:
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith(prefix):
                with open(f"/proc/self/fdinfo/{number}", encoding="ascii") as file:
                    positions[number] = file.readline()
        except OSError:
            continue  # closed meanwhile
    return positions


def make_error(error: BaseException, *, what: str, hint: str | None) -> UploadError:
    """Turn an exception of the hub's library into ours; addresses lose their query strings."""
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    if any(isinstance(link, OfflineModeIsEnabled) for link in chain):
        return make_offline_error(hint)
    status = next((code for link in chain if (code := read_status(link)) is not None), None)
    first = next((link for link in chain if read_status(link) is not None), error)
    lines = [line.strip() for line in str(first).splitlines() if line.strip()]
    # A signed address would let its reader write to the store.
    text = re.sub(r"\?[^\s'\"]+", "", " ".join(lines[:3])) or type(first).__name__
    if status in DENIED or any(isinstance(link, LocalTokenNotFoundError) for link in chain):
        return UploadError(
            "upload-denied",
            f"the hub refused {what}",
            expected="a token with write permission for this repository",
            found=text,
            hint="log in with `hf auth login` or set HF_TOKEN"
            + (f", then: {hint}" if hint else ""),
        )
    return UploadError("upload-failed", f"{what} failed", found=text, hint=hint)


def make_offline_error(hint: str | None = None) -> UploadError:
    """The error for an upload in offline mode."""
    return UploadError(
        "upload-offline",
        "the hub's library is in offline mode, so nothing can be uploaded",
        found="HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set",
        hint="unset it" + (f", then: {hint}" if hint else ", or leave out --hf_upload_path"),
    )


def read_status(error: BaseException) -> int | None:
    """HTTP status that an exception of the library carries."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


@contextmanager
def library_bars(*, enabled: bool) -> Iterator[None]:
    """Keep the library's own progress bars off a log, and leave its setting as it was."""
    from huggingface_hub import utils

    bars: Any = utils  # typed as if these three were not exported
    silence = not (enabled and sys.stderr.isatty()) and not bars.are_progress_bars_disabled()
    if silence:
        bars.disable_progress_bars()
    try:
        yield
    finally:
        if silence:
            bars.enable_progress_bars()
