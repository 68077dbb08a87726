"""One training step on gloo ranks, saved with torch DCP in every way its users do.

Run under torchrun. Writes below `--out`

    rows/step-1               {"model", "optim", "step"}, rows cut over all ranks
    columns/step-1            model tensors at the top beside "optimizer", cut by columns
    hsdp                      {"model", "ema"}, on a 2-D mesh with replicas
    accelerate/checkpoint-1   `Accelerator.save_state` with SHARDED_STATE_DICT
    hf, hf-nested             Hugging Face storage of the model, and of {"model", "optim"}
    hf-whole                  the same, consolidated by torch: whole files and `sharded/`
    <each>/reference.safetensors   full_tensor() of what was saved (`ema.safetensors` for the ema)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from .tiny_models import run_forward
from .train_fsdp import full_state


def load_model(pipeline: Path) -> Any:
    """The base's transformer."""
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel.from_pretrained(str(pipeline / "transformer"))


def train(model: Any, *, lr: float) -> torch.optim.Optimizer:
    """One AdamW step; the optimizer keeps its state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    run_forward(model).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def shard(pipeline: Path, mesh: DeviceMesh, *, columns: bool = False) -> Any:
    """The base's transformer under `fully_shard`."""
    size = mesh.size(mesh.ndim - 1)

    def place(parameter: Any) -> Shard | None:
        can = columns and parameter.ndim > 1 and parameter.shape[1] % size == 0
        return Shard(1) if can else None

    model = load_model(pipeline)
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    return model


def save_reference(state: dict[str, Any], path: Path) -> None:
    """Full tensors of a state dict. Collective."""
    full = full_state(state)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in full.items()}, path)
    dist.barrier()


def save_rows(pipeline: Path, out: Path) -> None:
    """rows."""
    model = shard(pipeline, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = train(model, lr=1e-2)
    state = get_model_state_dict(model)
    optim = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim, "step": 1}, checkpoint_id=out / "rows" / "step-1")
    save_reference(state, out / "rows" / "reference.safetensors")


def save_plain(pipeline: Path, out: Path) -> None:
    """columns, hsdp."""
    size = dist.get_world_size()
    model = shard(pipeline, init_device_mesh("cpu", (size,)), columns=True)
    optimizer = train(model, lr=2e-2)
    state = get_model_state_dict(model)
    optim = get_optimizer_state_dict(model, optimizer)
    dcp.save({**state, "optimizer": optim}, checkpoint_id=out / "columns" / "step-1")
    save_reference(state, out / "columns" / "reference.safetensors")

    model = shard(pipeline, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("r", "s")))
    train(model, lr=3e-2)
    state = get_model_state_dict(model)
    ema = {name: value * 0.5 for name, value in state.items()}
    dcp.save({"model": state, "ema": ema}, checkpoint_id=out / "hsdp")
    save_reference(state, out / "hsdp" / "reference.safetensors")
    save_reference(ema, out / "hsdp" / "ema.safetensors")


def save_hf(pipeline: Path, out: Path) -> None:
    """hf, hf-nested, hf-whole."""
    model = shard(pipeline, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = train(model, lr=4e-2)
    state = get_model_state_dict(model)
    optim = get_optimizer_state_dict(model, optimizer)
    moments = {"state": {k: {"exp_avg": v["exp_avg"]} for k, v in optim["state"].items()}}
    for name, content, options in (
        ("hf", state, {}),
        ("hf-nested", {"model": state, "optim": moments}, {}),
        ("hf-whole", state, {"enable_consolidation": True}),
    ):
        writer = HuggingFaceStorageWriter(str(out / name), save_distributed=True, **options)
        dcp.save(content, storage_writer=writer)
        save_reference(state, out / f"{name}-reference" / "reference.safetensors")


def save_accelerate(pipeline: Path, out: Path) -> None:
    """accelerate's own checkpoint."""
    from accelerate import (
        Accelerator,
        DistributedType,
        FullyShardedDataParallelPlugin,
        PartialState,
    )

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["QwenImageTransformerBlock"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # accelerate turns FSDP on only where there is a GPU; its FSDP code runs on gloo as well.
    # Every new AcceleratorState copies the type from PartialState.
    PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = load_model(pipeline)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(run_forward(model).float().pow(2).mean())
    optimizer.step()
    accelerator.save_state(str(out / "accelerate" / "checkpoint-1"))
    state = get_model_state_dict(model)
    assert any(hasattr(value, "placements") for value in state.values())
    save_reference(state, out / "accelerate" / "reference.safetensors")


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipeline", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["rows"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    save_rows(arguments.pipeline, arguments.out)
    if arguments.only is None:
        save_plain(arguments.pipeline, arguments.out)
        save_hf(arguments.pipeline, arguments.out)
        save_accelerate(arguments.pipeline, arguments.out)
    if dist.get_rank() == 0:
        config = dict(load_model(arguments.pipeline).config)
        text = json.dumps({**config, "_class_name": "QwenImageTransformer2DModel"})
        (arguments.out / "config.json").write_text(text)
        (arguments.out / "rows" / "config.json").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
