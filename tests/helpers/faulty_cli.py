"""The real command line with a fault at one rank's n-th transfer or step; run under torchrun.

    faulty_cli FAULT RANK NUMBER merge ...

FAULT: kill (SIGKILL), sleep (the transfer never comes), error (the source cannot be read).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def plant(fault: str, rank: int, number: int) -> None:
    """Wrap the place where the fault strikes, on that rank only."""
    if os.environ.get("RANK") != str(rank):
        return
    calls = [0]
    if fault == "error":
        from dist_merge.sources.rank_files import RankFileReader as owner  # noqa: N813

        name = "read"
    elif fault.startswith("step-"):
        from dist_merge.group import Group as owner  # noqa: N813

        name = "agree"
    else:
        from dist_merge.transports.gloo import GlooTransport as owner  # noqa: N813

        name = "transfer"
    original = getattr(owner, name)

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if name == "agree" and args[0] != fault.removeprefix("step-"):
            return original(self, *args, **kwargs)
        if name == "agree" or calls[0] == number:
            if fault == "error":
                raise OSError(5, "Input/output error", "model_world_size_2_rank_1.pt")
            if fault == "sleep":
                Path(os.environ["FAULT_MARK"]).touch()
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    setattr(owner, name, faulty)


if __name__ == "__main__":
    fault_name, fault_rank, fault_number, *arguments = sys.argv[1:]
    plant(fault_name, int(fault_rank), int(fault_number))
    from dist_merge.cli import main

    main(arguments)
