"""Time this tool against the floor and other tools, interleaved, on one checkpoint; one table.

    python -m benchmarks.make_checkpoint DIR --gib 2
    python -m benchmarks.time_merge DIR [--repeats 5] [--nproc 2] [--rows ours floor ...] [--save]

Every row is a whole process (torchrun for ours): wall seconds and CPU seconds of all its
processes. Medians over the repeats; in each repeat all rows run once, in turn. `--save` writes the
table into `benchmarks/results/` with the command, the versions and the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ALL_ROWS = (
    "ours", "ours, no base compare", "floor", "script", "script, verified", "accelerate",
    "accelerate, verified", "consolidate", "consolidate, verified",
)  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """One run."""

    wall: float
    cpu: float
    steps: dict[str, float]


def make_command(row: str, folder: Path, target: Path, *, nproc: int) -> list[str]:
    """Command of one row."""
    name, _, extra = row.partition(", ")
    if name != "ours":
        verified = ["--verified"] if extra else []
        return [sys.executable, "-m", "benchmarks.peers", name, str(folder), str(target), *verified]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc_per_node={nproc}", "-m", "dist_merge", "merge"]
    options = ["--local_dir", str(folder / "actor"), "--base_model", str(folder / "base")]
    options += ["--output_format", "transformer", "--target_dir", str(target)]
    options += ["--trust-checkpoint", "--quiet", "--max_shard_size", "2GiB"]
    return [*launcher, *options, *(["--no-compare-base"] if extra else [])]


def run_row(command: list[str]) -> Timing:
    """Run one command to its end."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall = time.monotonic() - start
    if done.returncode:
        sys.exit(f"exit code {done.returncode}: {' '.join(command)}\n{done.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    steps = json.loads(lines[-1]).get("seconds", {}) if lines else {}
    return Timing(wall, cpu, steps)


def describe_machine() -> dict[str, str]:
    """What the figures depend on."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Run the rows in turn and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rows", nargs="+", default=list(ALL_ROWS))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if not (options.folder / "dcp").exists():
        from .peers import prepare

        prepare(options.folder)
    timings: dict[str, list[Timing]] = {row: [] for row in options.rows}
    target = options.folder / "timed"
    for repeat in range(options.repeats):
        for row in options.rows:
            shutil.rmtree(target, ignore_errors=True)
            command = make_command(row, options.folder, target, nproc=options.nproc)
            timings[row].append(run_row(command))
            print(f"{repeat + 1}/{options.repeats} {row}: {timings[row][-1]}", file=sys.stderr)
    shutil.rmtree(target, ignore_errors=True)
    sizes = sum(path.stat().st_size for path in (options.folder / "actor").glob("*.pt"))
    lines = [f"{sizes / 2**30:.2f} GiB, {options.nproc} ranks, median of {options.repeats}", ""]
    lines += [
        "| row | wall s | CPU s | wall / floor | CPU / floor |",
        "| --- | --- | --- | --- | --- |",
    ]
    floor = timings.get("floor")
    for row, runs in timings.items():
        wall, cpu = (
            statistics.median(getattr(run, name) for run in runs) for name in ("wall", "cpu")
        )
        ratios = ["", ""]
        if floor:
            base = [statistics.median(getattr(r, name) for r in floor) for name in ("wall", "cpu")]
            ratios = [f"{wall / base[0]:.2f}", f"{cpu / base[1]:.2f}"]
        lines.append(f"| {row} | {wall:.2f} | {cpu:.2f} | {ratios[0]} | {ratios[1]} |")
    if "ours" in timings:
        lines += ["", f"steps of the last run of ours: {timings['ours'][-1].steps}"]
    text = "\n".join(lines)
    print(text)
    if options.save:
        folder = Path(__file__).parent / "results"
        folder.mkdir(exist_ok=True)
        stamp = time.strftime("%Y-%m-%d")
        head = f"`{' '.join(['python -m benchmarks.time_merge', *sys.argv[2:]])}`\n\n"
        machine = "\n".join(f"- {name}: {value}" for name, value in describe_machine().items())
        name = f"{stamp}-{sizes / 2**30:.0f}gib-{options.nproc}ranks.md"
        (folder / name).write_text(f"{head}{machine}\n\n{text}\n")


if __name__ == "__main__":
    main()
