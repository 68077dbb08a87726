"""Rank files written by real ranks: one model at several world sizes, and odd tensors.

Run under torchrun with 5 ranks. Writes below `--out`

    resharded/world_<W>/actor/...   the reference model under fully_shard on W ranks
    odd/<layout>/actor/...          odd tensors placed by distribute_tensor
    odd/reference.safetensors       what those must become
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

WORLD_SIZES = (1, 2, 3, 5)
LAYOUTS: dict[str, tuple[list[Any], list[Any]]] = {
    "rows": ([0, 1, 2], [Shard(0)]),
    "columns": ([0, 1], [Shard(-1)]),
    "hsdp": ([[0, 1], [2, 3]], [Replicate(), Shard(0)]),
    "replicated": ([0, 1], [Replicate()]),
    "grid": ([[0, 1], [2, 3]], [Shard(0), Shard(-1)]),
}


def make_odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors with sizes and dtypes that mergers get wrong."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "module.block._orig_mod.weight": draw(12, 8),
        "uneven": draw(7, 4),
        "half": draw(6, 4).bfloat16(),
        "single_row": draw(1, 4),
        "table": draw(1, 6, 8),
        "deep": draw(4, 3, 2, 2),
        "large": draw(512, 256),
        "large_half": draw(1024, 512).bfloat16(),
        "counts": torch.arange(10, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(7, dtype=torch.int32),
        "factor": torch.tensor(0.1),
        "nothing": torch.empty(0, 4),
    }


PLAIN = ("counts", "flags", "scalar", "factor")


def place(name: str, tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> Any:
    """Distribute one tensor; a dim that torch refuses to cut unevenly is cut by rows."""
    if name in PLAIN:
        return tensor.clone()
    size = mesh.size(mesh.ndim - 1)
    wanted = [Shard(tensor.dim() - 1) if p == Shard(-1) else p for p in placements]
    last = tensor.dim() - 1
    if Shard(last) in wanted and last > 0 and tensor.shape[last] % size:
        wanted = [Shard(0) if p == Shard(last) else p for p in wanted]
    return distribute_tensor(tensor, mesh, wanted)


def save(state: dict[str, Any], folder: Path, *, size: int, config: dict[str, Any]) -> None:
    """Save this rank's file, and the config on rank 0."""
    (folder / "huggingface").mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / f"model_world_size_{size}_rank_{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        (folder / "huggingface" / "config.json").write_text(json.dumps(config))


def write_odd(out: Path) -> None:
    """Write the odd tensors in every layout."""
    tensors = make_odd_tensors()
    for layout, (ranks, placements) in LAYOUTS.items():
        mesh = DeviceMesh("cpu", ranks)
        size = mesh.mesh.numel()
        if dist.get_rank() >= size:
            continue
        state = {name: place(name, t, mesh, placements) for name, t in tensors.items()}
        save(state, out / layout / "actor", size=size, config={"_class_name": "Odd"})
    if dist.get_rank() == 0:
        clean = {k.replace("module.", "").replace("_orig_mod.", ""): t for k, t in tensors.items()}
        save_file(clean, out / "reference.safetensors")


def write_resharded(out: Path, *, pipeline: Path, reference: Path) -> None:
    """Save one trained model at every world size."""
    from diffusers import QwenImageTransformer2DModel

    for size in WORLD_SIZES:
        mesh = DeviceMesh("cpu", list(range(size)))
        if dist.get_rank() >= size:
            continue
        model = QwenImageTransformer2DModel.from_pretrained(str(pipeline / "transformer"))
        model.load_state_dict(load_file(reference))
        config = json.loads(json.dumps({**model.config, "_class_name": type(model).__name__}))
        for block in model.transformer_blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        save(model.state_dict(), out / f"world_{size}" / "actor", size=size, config=config)


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipeline", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    write_odd(arguments.out / "odd")
    write_resharded(
        arguments.out / "resharded", pipeline=arguments.pipeline, reference=arguments.reference
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
