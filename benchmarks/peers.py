"""Other tools on the same weights, and the floor; run by `time_merge`, one job per process.

    python -m benchmarks.peers ROW FOLDER TARGET [--verified]

FOLDER comes from `benchmarks.make_checkpoint` and `benchmarks.peers prepare FOLDER`, which writes
the same weights as a torch DCP folder (`dcp/`) and in DCP's Hugging Face storage (`hf/`).
`--verified` adds what the tool lacks: SHA256 of sources and output on all cores, and reading the
output back and comparing it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PIECE = 2**18


def sha256(path: Path) -> str:
    """SHA256 of one file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(4 * PIECE):
            digest.update(piece)
    return digest.hexdigest()


def hash_all(paths: list[Path]) -> None:
    """SHA256 of files on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(sha256, paths))


def list_files(folder: Path, pattern: str) -> list[Path]:
    """Files of a folder, largest first."""
    return sorted(folder.rglob(pattern), key=lambda path: -path.stat().st_size)


def sync(path: Path) -> None:
    """Flush a file and drop its pages."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def floor(folder: Path, target: Path) -> None:
    """Read once, write once with fsync, SHA256 of both on all cores, read back once."""
    sources = list_files(folder / "actor", "*.pt")
    target.mkdir()
    output = target / "out.bin"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(sha256, path) for path in sources]
        digest = hashlib.sha256()
        with output.open("wb", buffering=0) as file:
            for path in sources:
                with path.open("rb", buffering=0) as source:
                    while piece := source.read(PIECE):
                        digest.update(piece)
                        file.write(piece)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with output.open("rb", buffering=0) as file:
            while file.read(4 * PIECE):
                pass
        for job in jobs:
            job.result()


def accelerate_merge(folder: Path, target: Path) -> None:
    """`accelerate merge-weights` of the DCP folder."""
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(str(folder / "dcp"), str(target), safe_serialization=True)


def consolidate(folder: Path, target: Path) -> None:
    """Torch's consolidation of DCP's Hugging Face storage."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    target.mkdir()
    consolidate_safetensors_files(
        str(folder / "hf"), str(target), fqn_to_index_mapping=None, num_threads=os.cpu_count() or 1
    )


def rank_files_single(folder: Path, target: Path) -> None:
    """The usual script: load all rank files, concatenate, `save_file`."""
    import torch.distributed.tensor

    states = [
        torch.load(path, weights_only=False, mmap=True)
        for path in sorted((folder / "actor").glob("model_world_size_*.pt"))
    ]
    target.mkdir()
    full = {n: torch.cat([s[n]._local_tensor for s in states]) for n in states[0]}
    save_file(full, target / "diffusion_pytorch_model.safetensors")


ROWS = {
    "floor": (floor, "actor", "*.pt"),
    "accelerate": (accelerate_merge, "dcp", "*.distcp"),
    "consolidate": (consolidate, "hf", "*.safetensors"),
    "script": (rank_files_single, "actor", "*.pt"),
}


def verify(row: str, folder: Path, target: Path) -> None:
    """What the tools lack."""
    _, source, pattern = ROWS[row]
    outputs = list_files(target, "*.safetensors")
    for path in outputs:
        sync(path)
    hash_all(list_files(folder / source, pattern) + outputs)
    for path in outputs:
        sync(path)
    reference = (
        load_file(folder / "base" / "diffusion_pytorch_model.safetensors")
        if (folder / "base" / "diffusion_pytorch_model.safetensors").exists()
        else {}
    )
    for path in outputs:
        for name, tensor in load_file(path).items():
            if name in reference:
                # Compared as integers: the values differ (the run moved them), the cost is that
                # of an equal pair.
                torch.equal(tensor.view(torch.int16), reference[name].view(torch.int16))
            else:
                bool(tensor.view(torch.int16).max())


def prepare(folder: Path) -> None:
    """Write the checkpoint's weights as a DCP folder and in DCP's Hugging Face storage, 2 ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*command, "-m", "benchmarks.prepare_peers", str(folder)], check=True)


def main() -> None:
    """Run one row."""
    row, folder = sys.argv[1], Path(sys.argv[2])
    if row == "prepare":
        prepare(folder)
        return
    target = Path(sys.argv[3])
    ROWS[row][0](folder, target)
    if "--verified" in sys.argv:
        verify(row, folder, target)


if __name__ == "__main__":
    main()
