"""A short soak: a signal at every step, on rank 0 and on another rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.conftest import Lab as SharedLab

from .jobs import Launcher
from .points import SIGNALS, SPOTS
from .soak import Lab, Soak, draw_trials


def test_signal_at_every_step_leaves_all_or_nothing(lab: SharedLab, tmp_path: Path) -> None:
    """Catches a half-made target, a hang, a false success, or a mess for the next run."""
    soak = Soak(Lab(lab.run() / "actor", lab.base), Launcher(is_in_process=True), tmp_path / "work")
    places = [(step, who) for step in SPOTS for who in (False, True)]
    kinds = list(SIGNALS)
    done = set()
    for trial in draw_trials(7, worlds=[2, 3]):
        place = (trial.fault.step, trial.fault.rank != 0)
        if place not in done:
            done.add(place)
            kind = kinds[sum(map(ord, place[0])) % 2 ^ place[1]]
            soak.run(replace(trial, fault=replace(trial.fault, kind=kind)))
        if len(done) == len(places):
            break
    assert not soak.violations, "\n".join(soak.violations)
    assert sum(row.outcomes["not reached"] for row in soak.rows.values()) == 0, soak.report()
    assert sum(row.outcomes["complete"] for row in soak.rows.values()) >= 2, soak.report()
