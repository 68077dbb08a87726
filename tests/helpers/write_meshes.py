"""Rank files of eight real ranks: tensors on all sorts of meshes, and models of four engines.

Run under torchrun with 8 ranks. Writes below `--out`

    mesh/actor/...            everything in one state dict per rank
    flat/actor/...            FSDP1's LOCAL_STATE_DICT
    old/tp/actor/...          FSDP over tensor parallelism as torch 2.4 would have written it
    descending/actor/...      one tensor on a mesh of descending ranks
    reference.safetensors     what `mesh` must become
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from dist_merge.records import DTYPES

WORLD_SIZE = 8
NUM_CASES = 240
# Ranks of each mesh; names where it has any.
MESHES: list[tuple[Any, tuple[str, ...] | None]] = [
    ([0, 1, 2, 3, 4, 5, 6, 7], ("fsdp",)),
    ([0, 1, 2], None),
    ([5], ("anything",)),
    ([[0, 1, 2, 3], [4, 5, 6, 7]], ("ddp", "fsdp")),
    ([[0, 1], [2, 3], [4, 5], [6, 7]], ("dp", "tp")),
    ([[2, 3, 4], [5, 6, 7]], None),
    ([[0, 1, 2, 3]], ("dp_replicate", "dp_shard")),
    ([[0], [3], [6]], ("ep", "ep_fsdp")),
    ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ("dp_replicate", "dp_shard", "tp")),
    ([[[0, 1]], [[2, 3]], [[4, 5]]], None),
]
Truth = dict[str, torch.Tensor]


def draw_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice([0, 1, 2, 3, 5, 7, 8, 11, 13, 17]) for _ in range(rng.randrange(5)))


def draw_tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits of a dtype that are neither NaN nor infinite; equal on all ranks."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        if dtype is torch.float8_e8m0fnu:
            bits = torch.randint(0, 255, shape, generator=generator, dtype=torch.uint8)
            return bits.view(dtype)
        return torch.randn(shape, generator=generator).to(dtype)
    numbers = torch.randint(0, 2 if dtype is torch.bool else 120, shape, generator=generator)
    return numbers.to(dtype)


def draw_placements(rng: random.Random, ndim: int, mesh: DeviceMesh) -> list[Any]:
    """Any placements but three strided axes on one dim, which can be ambiguous."""
    placements: list[Any] = []
    for _ in range(mesh.ndim):
        kind = rng.choice(["shard", "shard", "strided", "replicate"]) if ndim else "replicate"
        dim = rng.randrange(ndim) if ndim else 0
        if kind == "strided":
            placements.append(_StridedShard(dim, split_factor=rng.choice([2, 2, 3, 4])))
        else:
            placements.append(Shard(dim) if kind == "shard" else Replicate())
    dims = [p.dim for p in placements if not isinstance(p, Replicate)]
    if len(dims) == 3 and len(set(dims)) == 1:
        placements[0] = Replicate()
    return placements


def write_cases(state: dict[str, Any], truth: Truth) -> None:
    """Tensors of any shape and dtype, distributed by torch itself."""
    rng = random.Random(7)
    meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=names) for ranks, names in MESHES]
    meshes += [meshes[8]["dp_shard", "tp"], meshes[8]["tp"], meshes[8]["dp_replicate", "dp_shard"]]
    meshes.append(meshes[8]["dp_replicate", "dp_shard"]._flatten("dp"))
    dtypes = [getattr(torch, name) for name in DTYPES]
    for number in range(NUM_CASES):
        mesh, name = meshes[number % len(meshes)], f"cases.{number}"
        dtype = dtypes[number // 3 % len(dtypes)] if number % 3 else torch.float32
        shape = draw_shape(rng)
        full = draw_tensor(rng, shape, dtype)
        placements = draw_placements(rng, len(shape), mesh)
        # Not every dtype, no empty tensor and no uneven strided one can be scattered.
        is_plain = not any(isinstance(p, _StridedShard) for p in placements)
        is_scattered = is_plain and dtype is torch.float32 and full.numel() > 0
        state[name] = distribute_tensor(
            full, mesh, placements, src_data_rank=0 if is_scattered else None
        )
        truth[name] = full


def write_sequences(state: dict[str, Any], truth: Truth) -> None:
    """Tensors cut like FSDP2 over tensor parallelism, the later mesh axis first."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate() or (0, 0)
    for rows in (*range(18), 33, 41):
        full = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3) + rows
        local = chunk(chunk(full, 2, tp), 4, dp)
        state[f"sequences.{rows}"] = DTensor.from_local(
            local.clone(),
            mesh,
            [_StridedShard(0, split_factor=2), Shard(0)],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        truth[f"sequences.{rows}"] = full


def chunk(tensor: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    pieces = tensor.chunk(parts)
    return pieces[index] if index < len(pieces) else tensor[:0]


def write_views(state: dict[str, Any], truth: Truth) -> None:
    """Values that are part of a larger storage, share one, or have wrappers in their names."""
    mesh, rank = DeviceMesh("cpu", list(range(WORLD_SIZE))), dist.get_rank()
    table = torch.arange(24 * 10, dtype=torch.float32).view(24, 10)
    local = table[3 * rank : 3 * rank + 3]
    views: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "views.columns": (local[:, 2:5], table[:, 2:5]),
        "views.transposed": (local.clone().t().contiguous().t(), table),
        "views.every_other": (local[:, ::2], table[:, ::2]),
    }
    for name, (piece, view) in views.items():
        truth[name] = view.contiguous()
        state[name] = distribute_tensor(truth[name], mesh, [Shard(0)])
        # Put in place afterwards: torch cannot pickle a DTensor that is made from a view.
        state[name]._local_tensor = piece
    plain = torch.arange(60, dtype=torch.int32)
    state["views.plain"] = plain[7:19]
    state["views.plain_too"] = plain[9:12]
    state["views.turned"] = plain.view(6, 10).t()
    state["views.conjugate"] = torch.complex(plain[:4].float(), plain[4:8].float()).conj()
    for name in ("plain", "plain_too", "turned", "conjugate"):
        truth[f"views.{name}"] = state[f"views.{name}"].resolve_conj().contiguous().clone()
    state["views.tied_a"] = state["views.tied_b"] = distribute_tensor(table, mesh, [Shard(0)])
    truth["views.tied_a"], truth["views.tied_b"] = table, table.clone()
    if rank in (2, 5):
        state["views.on_some_ranks"] = torch.arange(5)
    truth["views.on_some_ranks"] = torch.arange(5)
    wrapped = "module._orig_mod.base_model.model.views._fsdp_wrapped_module.wrapped"
    state[f"{wrapped}._checkpoint_wrapped_module.weight"] = torch.ones(3)
    truth["views.wrapped.weight"] = torch.ones(3)


class Block(nn.Module):
    """Two matrices of odd sizes, a norm and an integer buffer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("steps", torch.tensor([3, 1, 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def make_model(width: int, hidden: int) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(Block(width, hidden), Block(width, hidden))


def step(model: nn.Module, width: int) -> None:
    """One AdamW step; ranks of one data-parallel group see different data."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank() // 2)
    loss = model(torch.randn(4, width, generator=generator)).pow(3).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def add_model(state: dict[str, Any], truth: Truth, name: str, saved: Any, full: Any) -> None:
    """Add a model's state dict, and its full tensors, under a name."""
    state.update({f"{name}.{key}": value for key, value in saved.items()})
    truth.update({f"{name}.{key}": value.detach().clone() for key, value in full.items()})


def full_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Full tensors of a state dict; collective."""
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in state.items()
    }


def glue_tensors(state: dict[str, Any], dp: DeviceMesh, tp: DeviceMesh) -> dict[str, torch.Tensor]:
    """Full tensors of uneven FSDP2 over tensor parallelism, put together by hand; collective.

    `full_tensor` reads strided placements left to right, which FSDP2's uneven pieces are not.
    """
    full = {}
    for key, value in state.items():
        tensor = value
        if isinstance(value, DTensor):
            tensor = glue(value._local_tensor, dp, 0)
            inner = value.placements[-1]
            names = value.device_mesh.mesh_dim_names or ()
            if "tp" in names and not isinstance(inner, Replicate):
                tensor = glue(tensor, tp, inner.dim)
        full[key] = tensor
    return full


def glue(piece: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Concatenate the pieces of one mesh axis, of any sizes."""
    pieces: list[Any] = [None] * mesh.size()
    dist.all_gather_object(pieces, piece.detach().clone(), group=mesh.get_group())
    return torch.cat(pieces, dim)


def write_fsdp2(state: dict[str, Any], truth: Truth) -> None:
    """FSDP2 alone, replicated, over tensor parallelism, and all three, even and not."""
    fsdp = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
    hsdp = init_device_mesh("cpu", (2, 4), mesh_dim_names=("ddp", "fsdp"))
    for name, mesh in (("fsdp2", fsdp), ("hsdp", hsdp)):
        model = make_model(12, 21)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        step(model, 12)
        add_model(state, truth, name, model.state_dict(), full_tensors(model.state_dict()))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    grid = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    sub = cube["dp_replicate", "dp_shard"]
    for name, mesh, tp, hidden in (
        ("tp_even", grid["dp"], grid["tp"], 32),
        ("tp_uneven", grid["dp"], grid["tp"], 22),
        ("hsdp_tp", sub, cube["tp"], 24),
    ):
        model = make_model(12, hidden)
        for block in model:
            parallelize_module(block, tp, plan)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        step(model, 12)
        saved = model.state_dict()
        dp = mesh if mesh.ndim == 1 else cube["dp_shard"]
        full = glue_tensors(saved, dp, tp)
        if name != "tp_uneven":
            for key, value in full_tensors(saved).items():
                assert torch.equal(value, full[key]), (name, key)
        add_model(state, truth, name, saved, full)


def write_fsdp1(state: dict[str, Any], truth: Truth) -> dict[str, Any]:
    """FSDP1 with and without a mesh, whole and replicated; returns a LOCAL_STATE_DICT."""
    cpu = torch.device("cpu")
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
    grid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("ddp", "fsdp"))
    hybrid = ShardingStrategy.HYBRID_SHARD
    options: dict[str, dict[str, Any]] = {
        "fsdp1_sharded": {},
        "fsdp1_orig_params": {"use_orig_params": True},
        "fsdp1_mesh": {"device_mesh": mesh},
        "fsdp1_hybrid": {"device_mesh": grid, "sharding_strategy": hybrid},
    }
    flat: dict[str, Any] = {}
    for name, extra in options.items():
        model = make_model(12, 21)
        model[0] = FSDP(model[0], device_id=cpu, **extra)
        model = FSDP(model, device_id=cpu, **extra)
        step(model, 12)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            full = {key: value.clone() for key, value in model.state_dict().items()}
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            add_model(state, truth, name, model.state_dict(), full)
        if name == "fsdp1_sharded":
            with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                flat = dict(model.state_dict())
    return flat


def make_old() -> tuple[dict[str, Any], Truth]:
    """FSDP over tensor parallelism with the placements of a torch without strided ones."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate() or (0, 0)
    full = torch.arange(16 * 3, dtype=torch.float32).view(16, 3)
    weight = DTensor.from_local(
        chunk(chunk(full, 2, tp), 4, dp).clone(), mesh, [Shard(0), Shard(0)], run_check=False
    )
    return {"weight": weight}, {"weight": full}


def rename_classes(path: Path) -> None:
    """Give the classes in a rank file the names that torch 2.4 knew them by."""
    reader = torch._C.PyTorchFileReader(str(path))
    records = {name: reader.get_record(name) for name in reader.get_all_records()}
    for old, new in (
        (b"ctorch.distributed.tensor\nDTensor", b"ctorch.distributed._tensor.api\nDTensor"),
        (
            b"ctorch.distributed.tensor.placement_types",
            b"ctorch.distributed._tensor.placement_types",
        ),
    ):
        assert old in records["data.pkl"]
        records["data.pkl"] = records["data.pkl"].replace(old, new)
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, record in records.items():
        if name not in ("version", ".data/serialization_id", ".format_version"):
            writer.write_record(name, record, len(record))
    writer.write_end_of_file()


def make_descending() -> dict[str, Any]:
    mesh = DeviceMesh("cpu", list(range(WORLD_SIZE))[::-1])
    return {"weight": distribute_tensor(torch.arange(16.0), mesh, [Shard(0)])}


def save(state: dict[str, Any], folder: Path) -> None:
    """Save this rank's file, and the config on rank 0."""
    if dist.get_rank() == 0:
        (folder / "huggingface").mkdir(parents=True)
        (folder / "huggingface" / "config.json").write_text('{"_class_name": "Odd"}')
    dist.barrier()
    torch.save(state, folder / f"model_world_size_{WORLD_SIZE}_rank_{dist.get_rank()}.pt")
    dist.barrier()


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state: dict[str, Any] = {}
    truth: Truth = {}
    writers: list[Callable[[dict[str, Any], Truth], Any]] = [
        write_cases,
        write_sequences,
        write_views,
        write_fsdp2,
    ]
    for write in writers:
        write(state, truth)
    flat = write_fsdp1(state, truth)
    save(state, out / "mesh" / "actor")
    save(flat, out / "flat" / "actor")
    save(make_descending(), out / "descending" / "actor")
    old, old_truth = make_old()
    save(old, out / "old" / "tp" / "actor")
    rename_classes(out / "old" / "tp" / "actor" / f"model_world_size_8_rank_{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        contiguous = {key: value.contiguous().clone() for key, value in truth.items()}
        save_file(contiguous, out / "reference.safetensors")
        save_file(old_truth, out / "old" / "reference.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
