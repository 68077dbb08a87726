"""Train LoRA adapters on tiny transformers for one FSDP2 step; run under torchrun.

Writes below `--out`, per case of `CASES`:

    base/                    the base transformer, saved by Diffusers
    full/, lora_only/        rank files of the whole model, and of the adapters' tensors only
    config/                  adapter_config.json as PEFT writes it for adapter `default`
    state.safetensors        full_tensor() of everything, taken in the run
    merged.safetensors       weights after PEFT's own merge of `default`
    forward.pt, plain.pt     output with `default` active, and with adapters off
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from . import tiny_models
from .tiny_transformers import TINY_TRANSFORMERS, run_forward
from .train_fsdp import full_state, save_actor

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


@dataclass(frozen=True)
class LoraCase:
    """One model with its adapters; `options` are PEFT's LoraConfig's."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    is_wrapped: bool = False
    adapters: tuple[str, ...] = ("default", "old")

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of LoraConfig: alpha differs from r."""
        return {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, **self.options}


FAMILIES = ("qwen", *TINY_TRANSFORMERS)
H3 = [*ATTENTION, "ff.net.0.proj", "ff.net.2"]
CASES = {
    **{name: LoraCase(name, {"target_modules": H3} if name == "minimax_h3" else {})
       for name in FAMILIES},
    "bfloat16": LoraCase("qwen", dtype=torch.bfloat16),
    "wrapped": LoraCase("qwen", is_wrapped=True),
    "names": LoraCase("qwen", adapters=("lora", "lora_A")),
    "rslora": LoraCase("qwen", {"use_rslora": True}),
    "patterns": LoraCase(
        "qwen",
        {
            "rank_pattern": {"transformer_blocks.0.attn.to_q": 2, "to_v": 3},
            "alpha_pattern": {"transformer_blocks.1.attn.to_k": 9, "to_v": 1},
        },
    ),
    "lora_bias": LoraCase("qwen", {"lora_bias": True}),
    "modules_to_save": LoraCase("qwen", {"modules_to_save": ["proj_out"]}),
    "bias_all": LoraCase("qwen", {"bias": "all"}, adapters=("default",)),
    "dora": LoraCase("qwen", {"use_dora": True}),
    "suffix": LoraCase("flux", {"target_modules": ["proj_out"]}),
    "conv2d": LoraCase("sd3", {"target_modules": ["pos_embed.proj", "to_q"]}),
    "conv3d": LoraCase("wan", {"target_modules": ["patch_embedding", "to_q"]}),
    "pissa": LoraCase("qwen", {"init_lora_weights": "pissa"}, adapters=("default",)),
    "olora": LoraCase("qwen", {"init_lora_weights": "olora"}, adapters=("default",)),
}  # fmt: skip


def build(family: str) -> Any:
    """Build the base model of a family."""
    if family == "qwen":
        return tiny_models.make_transformer()
    from .tiny_transformers import build as build_other

    return build_other(family)


def forward(model: Any, family: str) -> list[torch.Tensor]:
    """Outputs of one forward pass."""
    if family != "qwen":
        return run_forward(model, family)
    dtype = next(p.dtype for n, p in model.named_parameters() if "lora" not in n)
    return [tiny_models.run_forward(model, dtype=dtype)]


def attach(model: Any, case: LoraCase) -> Any:
    """Attach the adapters, the first one active; factors are random, also B."""
    import peft

    first, *others = case.adapters
    config = peft.LoraConfig(**copy.deepcopy(case.config))
    if case.is_wrapped:
        model = peft.get_peft_model(model, config, adapter_name=first)
        for name in others:
            model.add_adapter(name, peft.LoraConfig(**copy.deepcopy(case.config)))
        model.set_adapter(first)
    else:
        model.add_adapter(config, adapter_name=first)
        for name in others:
            model.add_adapter(peft.LoraConfig(**copy.deepcopy(case.config)), adapter_name=name)
        model.set_adapter(first)
    generator = torch.Generator().manual_seed(7)
    changes_base = case.options.get("init_lora_weights") in ("pissa", "olora")
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name and "magnitude" not in name and not changes_base:
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data.copy_(values)
        elif "magnitude" in name:
            scale = 1 + torch.rand(parameter.shape, generator=generator)
            parameter.data.mul_(scale.to(parameter.dtype))
    return model.to(case.dtype)


def train_case(case: LoraCase, out: Path) -> None:
    """One AdamW step of the first adapter, saved the way verl saves an actor. Collective."""
    model = build(case.family).to(case.dtype)
    config = json.loads(
        json.dumps({**model.config, "_class_name": type(model).__name__}, default=list)
    )
    if dist.get_rank() == 0:
        model.save_pretrained(out / "base")
    model = attach(model, case)
    peft_config = model.peft_config[case.adapters[0]]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    inner = model.base_model.model if case.is_wrapped else model
    for module in inner.children():
        if isinstance(module, torch.nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    sum(output.float().pow(2).mean() for output in forward(model, case.family)).backward()
    optimizer.step()
    state = model.state_dict()
    save_actor(copy.copy(state), out / "full", config=config)
    only = {k: v for k, v in state.items() if "lora_" in k}
    save_actor(only, out / "lora_only", config=config)
    full = full_state(state)
    if dist.get_rank() == 0:
        for folder in ("full", "lora_only"):
            meta = {"r": peft_config.r, "lora_alpha": int(peft_config.lora_alpha)}
            meta["task_type"] = "CAUSAL_LM"
            (out / folder / "lora_train_meta.json").write_text(json.dumps(meta))
        peft_config.save_pretrained(out / "config")
        save_file({k: v.contiguous() for k, v in full.items()}, out / "state.safetensors")
        judge(case, full, out)
    dist.barrier()


def judge(case: LoraCase, full: dict[str, torch.Tensor], out: Path) -> None:
    """What PEFT itself makes of the trained tensors. Ranks: rank 0 only."""
    model = attach(build(case.family).to(case.dtype), case)
    model.load_state_dict(full, strict=True)
    with torch.no_grad():
        torch.save(forward(model, case.family), out / "forward.pt")
        if case.is_wrapped:
            with model.disable_adapter():
                torch.save(forward(model, case.family), out / "plain.pt")
            model = model.merge_and_unload(adapter_names=[case.adapters[0]])
        else:
            model.disable_adapters()
            torch.save(forward(model, case.family), out / "plain.pt")
            model.enable_adapters()
            model.fuse_lora(adapter_names=[case.adapters[0]])
            model.unload_lora()
    merged = {k: v.contiguous() for k, v in model.state_dict().items()}
    assert not any("lora" in name or "base_layer" in name for name in merged)
    # Unloading leaves the wrapper of a module that was trained as a whole.
    own = f".modules_to_save.{case.adapters[0]}."
    others = [f".modules_to_save.{name}." for name in case.adapters[1:]] + [".original_module."]
    kept = {name.replace(own, "."): value for name, value in merged.items()
            if not any(other in name for other in others)}  # fmt: skip
    save_file(kept, out / "merged.safetensors")


def main() -> None:
    """Train all cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in arguments.cases:
        torch.manual_seed(0)
        train_case(CASES[name], arguments.out / name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
