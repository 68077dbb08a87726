"""Peak private memory of every rank of a merge, beyond what its imports and plan take.

Usage: python -m benchmarks.measure_memory FOLDER [--nproc 2] [-- merge options]

FOLDER comes from `benchmarks.make_checkpoint`. Samples RssAnon + RssShmem of each rank every
10 ms, first of `inspect` (imports, headers, plan), then of `merge`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path


def read_private_kib(pid: int) -> int:
    """RssAnon + RssShmem of a process in KiB; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return sum(int(fields.get(name, "0 kB").split()[0]) for name in ("RssAnon", "RssShmem"))


def find_ranks(parent: int) -> dict[int, int]:
    """Rank -> pid of the launcher's children."""
    ranks = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(stat[1]) == parent:
            values = dict(item.split(b"=", 1) for item in environment if b"=" in item)
            if b"RANK" in values:
                ranks[int(values[b"RANK"])] = int(entry.name)
    return ranks


def run(command: list[str]) -> tuple[dict[int, int], float]:
    """Run a torchrun job; returns peak KiB per rank and seconds."""
    start = time.monotonic()
    peaks: dict[int, int] = {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as job:
        ranks: dict[int, int] = {}
        while job.poll() is None:
            if not ranks or time.monotonic() - start < 10:
                ranks.update(find_ranks(job.pid))
            for rank, pid in ranks.items():
                peaks[rank] = max(peaks.get(rank, 0), read_private_kib(pid))
            time.sleep(0.01)
    if job.returncode:
        sys.exit(f"exit code {job.returncode}: {' '.join(command)}")
    return peaks, time.monotonic() - start


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("extra", nargs="*")
    options = parser.parse_args()
    target = options.folder / "merged"
    shutil.rmtree(target, ignore_errors=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc_per_node={options.nproc}", "-m", "dist_merge"]
    inputs = ["--local_dir", str(options.folder / "actor")]
    inputs += ["--base_model", str(options.folder / "base"), "--output_format", "transformer"]
    inputs += ["--trust-checkpoint", "--quiet", *options.extra]
    before, _ = run([*launcher, "inspect", *inputs])
    peaks, seconds = run([*launcher, "merge", "--target_dir", str(target), *inputs])
    print("rank  imports and plan  peak  beyond   (MiB, RssAnon + RssShmem)")
    for rank in sorted(peaks):
        own, peak = before[rank] / 1024, peaks[rank] / 1024
        print(f"{rank:4d}  {own:16.0f}  {peak:4.0f}  {peak - own:6.0f}")
    print(f"merge: {seconds:.1f} s, start-up included")


if __name__ == "__main__":
    main()
