"""A short soak: the publishing rank killed at every step, and a choice of the other faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Lab as SharedLab

from .jobs import Launcher
from .points import SPOTS, Fault
from .soak import Lab, Soak, Trial

pytestmark = pytest.mark.slow

OTHERS = [
    Fault("SIGTERM", "inspect", 0, 1),
    Fault("SIGTERM", "before rename", 0, 1),
    Fault("SIGTERM", "write", 1, 5),
    Fault("SIGTERM", "finish", 1, 1),
    Fault("SIGKILL", "inspect", 1, 1),
    Fault("SIGKILL", "gather", 1, 7),
    Fault("SIGKILL", "verify", 1, 1),
    Fault("SIGKILL", "finish", 1, 1),
    Fault("SIGKILL", "before rename", 1, 1),
    Fault("SIGKILL", "after rename", 1, 1),
]


def test_signal_at_every_step_leaves_all_or_nothing(lab: SharedLab, tmp_path: Path) -> None:
    """Catches a half-made target, a hang, a false success, or a mess for the next run."""
    soak = Soak(Lab(lab.run() / "actor", lab.base), Launcher(is_in_process=True), tmp_path / "work")
    every_step = [Fault("SIGKILL", step, 0, 1 + number) for number, step in enumerate(SPOTS)]
    for number, fault in enumerate([*every_step, *OTHERS]):
        call = min(fault.call, fault.spot.calls)
        fault = Fault(fault.kind, fault.step, fault.rank, call)
        soak.run(Trial(fault, size=2 + number % 2, holds_store=number % 3 != 0))
    assert not soak.violations, "\n".join(soak.violations)
    assert sum(row.outcomes["not reached"] for row in soak.rows.values()) == 0, soak.report()
    assert sum(row.outcomes["complete"] for row in soak.rows.values()) >= 2, soak.report()
