"""Train tiny Qwen-Image transformers in many ways and publish in the middle; 4 torchrun ranks.

Per kind below `--out`: `live/` published by `publish_model` after two steps, `actor/` the rank
files saved at the same moment, `async/` published by `publish_model_async` while training went
on, and `<kind>_<rank>.json` with what this rank saw.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dist_merge import MergeError, publish_model, publish_model_async

from .tiny_models import make_transformer, run_forward
from .train_fsdp import save_actor


def shard(model: Any, mesh: Any) -> Any:
    """Apply FSDP2 to blocks and root."""
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_fsdp2() -> Any:
    return shard(make_transformer(), init_device_mesh("cpu", (4,)))


def make_hsdp() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    return shard(make_transformer(), mesh)


def make_tensor_parallel() -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_transformer()
    for block in model.transformer_blocks:
        plan = {"img_mlp.net.0.proj": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(block, mesh["tp"], plan)
    return shard(model, mesh["dp"])


def make_fsdp1() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = make_transformer()
    policy = ModuleWrapPolicy({type(model.transformer_blocks[0])})
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        device_mesh=init_device_mesh("cpu", (4,)),
    )


def make_ddp() -> Any:
    return torch.nn.parallel.DistributedDataParallel(
        make_transformer(), find_unused_parameters=True
    )


def make_accelerate() -> Any:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    options = DistributedDataParallelKwargs(find_unused_parameters=True)
    return Accelerator(cpu=True, kwargs_handlers=[options]).prepare(make_transformer())


def make_plain() -> Any:
    return make_transformer()


def make_compiled() -> Any:
    return torch.compile(make_fsdp2(), backend="eager")


def make_diffusers_lora() -> Any:
    from peft import LoraConfig

    model = make_transformer()
    options = {"r": 4, "lora_alpha": 6, "use_rslora": True, "init_lora_weights": False}
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    torch.manual_seed(3)
    model.add_adapter(LoraConfig(**options, target_modules=targets))
    return shard(model, init_device_mesh("cpu", (4,)))


def make_peft_lora() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["to_q", "to_v"],
        alpha_pattern={"to_v": 2},
        init_lora_weights=False,
    )
    model = get_peft_model(make_transformer(), config)
    mesh = init_device_mesh("cpu", (4,))
    for block in model.base_model.model.transformer_blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS: dict[str, Callable[[], Any]] = {
    "fsdp2": make_fsdp2,
    "hsdp": make_hsdp,
    "tensor_parallel": make_tensor_parallel,
    "fsdp1": make_fsdp1,
    "ddp": make_ddp,
    "accelerate": make_accelerate,
    "plain": make_plain,
    "compiled": make_compiled,
    "diffusers_lora": make_diffusers_lora,
    "peft_lora": make_peft_lora,
}
FUSED = ("diffusers_lora", "peft_lora")


def step(model: Any, optimizer: Any) -> None:
    """One step on inputs that depend on the random state, as data loading does."""
    torch.randn(3)
    run_forward(model).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(model: Any, optimizer: Any) -> str:
    """SHA256 of this rank's parameters, optimizer state and random state, bit for bit."""
    state = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        local = getattr(parameter, "_local_tensor", parameter).detach()
        state.update(local.contiguous().numpy().tobytes())
        for _, value in sorted(optimizer.state.get(parameter, {}).items()):
            value = getattr(value, "_local_tensor", value)
            state.update(value.detach().contiguous().numpy().tobytes())
    state.update(torch.get_rng_state().numpy().tobytes())
    return state.hexdigest()


def train(kind: str, *, middle: Callable[[Any], None]) -> str:
    """Two steps, `middle`, two steps; returns the digest at the end."""
    torch.manual_seed(11)
    torch._dynamo.reset()
    model = KINDS[kind]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        step(model, optimizer)
    middle(model)
    for _ in range(2):
        step(model, optimizer)
    return digest(model, optimizer)


def observe() -> dict[str, Any]:
    """What a publish must leave as it was."""
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "rng": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "threads": torch.get_num_threads(),
    }


def run_kind(kind: str, base: Path, out: Path) -> dict[str, Any]:
    """Publish in the middle of a run, and compare with a run that does not."""
    seen: dict[str, Any] = {}
    options = {"base_model": base, "quiet": True, "fuse_lora": kind in FUSED, "timeout": 60}

    def publish(model: Any) -> None:
        before = observe()
        modes = {"hsdp": torch.no_grad, "ddp": torch.inference_mode}
        with modes.get(kind, contextlib.nullcontext)():
            result = publish_model(model, target_dir=out / "live", **options)
        seen["same"] = observe() == before
        seen["result"] = result.output_dir
        seen["handle"] = publish_model_async(model, target_dir=out / "async", **options)
        save_rank_files(model, out / "actor")

    seen["published"] = train(kind, middle=publish)
    handle = seen.pop("handle")
    seen["async"] = handle.result(60).output_dir
    seen["plain"] = train(kind, middle=lambda model: None)
    return seen


def save_rank_files(model: Any, folder: Path) -> None:
    """Save what `publish_model` published, as rank files."""
    from dist_merge.live.model import read_live_model

    live = read_live_model(model, model_config=None, adapter_configs=None)
    state = {name.removeprefix("module."): value for name, value in live.state.items()}
    save_actor(copy.copy(state), folder, config=dict(live.config))
    if dist.get_rank() == 0:
        for config in live.adapters.values():
            (folder / "adapter_config.json").write_text(json.dumps(config))


def run_state_dict(base: Path, out: Path) -> dict[str, Any]:
    """Publish a state dict of DTensors, by a subgroup, with 20 repetitions of a small publish."""
    model = make_fsdp2()
    config = {**model.config, "_class_name": "QwenImageTransformer2DModel"}
    options = {"base_model": base, "quiet": True, "timeout": 60, "output_format": "transformer"}
    state = model.state_dict()
    publish_model(state, target_dir=out / "state", model_config=config, **options)
    half = dist.new_group([1, 3])
    seen: dict[str, Any] = {}
    if dist.get_rank() in (1, 3):
        torch.manual_seed(11)
        own = make_transformer()
        publish_model(own, target_dir=out / "subgroup", process_group=half, **options)
    else:
        try:
            publish_model(model, target_dir=out / "no", process_group=half, **options)
        except (MergeError, ValueError) as error:
            seen["outsider"] = str(error)
    dist.barrier()
    counts = []
    for number in range(20):
        publish_model(model, target_dir=out / f"step{number}", **options)
        dist.barrier()
        counts.append(count_resources())
    seen["counts"] = counts
    return seen


def count_resources() -> dict[str, int]:
    """Threads, file descriptors, process groups, store keys and resident memory of this rank."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "threads": threading.active_count(),
        "os_threads": int(status["Threads"]),
        "files": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "keys": dist.distributed_c10d._get_default_store().num_keys(),
        "anonymous_kib": int(status["RssAnon"].split()[0]),
    }


def run_faults(base: Path, out: Path) -> dict[str, Any]:
    """One rank raises before or inside the call; parameters change right after an async call."""
    seen: dict[str, Any] = {}
    model = make_fsdp2()
    options = {"base_model": base, "quiet": True, "output_format": "transformer"}
    state = dict(model.state_dict())
    config = {**model.config, "_class_name": "QwenImageTransformer2DModel"}
    if dist.get_rank() == 2:
        state["proj_out.weight"] = "no tensor"
    try:
        publish_model(state, target_dir=out / "inside", model_config=config, **options)
    except MergeError as error:
        seen["inside"] = str(error)
    try:
        publish_model_async(
            state, target_dir=out / "inside", model_config=config, **options
        ).result(60)
    except MergeError as error:
        seen["inside_async"] = str(error)
    dist.barrier()
    # Rank 1 does not call; when it does at last, the others have given up.
    for caller in (lambda rank: rank != 1, lambda rank: rank == 1):
        if caller(dist.get_rank()):
            try:
                publish_model(model, target_dir=out / "before", timeout=6, **options)
            except MergeError as error:
                seen["before"] = str(error)
        dist.barrier()
    handle = publish_model_async(model, target_dir=out / "mutated", **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter._local_tensor.fill_(7.0)
    seen["mutated"] = handle.result(60).output_dir
    return seen


def main() -> None:
    """Run all kinds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind in arguments.kinds:
        folder = arguments.out / kind
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        if kind == "state_dict":
            seen = run_state_dict(arguments.base, folder)
        elif kind == "faults":
            seen = run_faults(arguments.base, folder)
        else:
            seen = run_kind(kind, arguments.base, folder)
        (arguments.out / f"{kind}_{dist.get_rank()}.json").write_text(json.dumps(seen))
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
