"""Build every family's tiny pipeline and train its transformer for one FSDP2 step; torchrun.

Writes below `--out`, per run of `RUNS`: `actor/`, `reference.safetensors`, `forward.pt`; and per
pipeline `base/<name>/`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .tiny_pipelines import BOOGU_PACKAGE, PIPELINES, run_pipeline_forward
from .train_fsdp import full_state, save_actor

# Run -> pipeline, trained component.
RUNS = {
    **{name: (name, "transformer") for name in PIPELINES},
    "wan_second": ("wan_dual", "transformer_2"),
}


def load_component(base: Path, component: str) -> Any:
    """Load the component through the class that its config names."""
    import diffusers

    folder = base / component
    name = json.loads((folder / "config.json").read_text())["_class_name"]
    cls = getattr(diffusers, name, None)
    if cls is None:
        from boogu.models.transformers import transformer_boogu

        cls = getattr(transformer_boogu, name)
    return cls.from_pretrained(str(folder))


def train_run(name: str, out: Path) -> None:
    """One AdamW step of one component, saved the way verl saves an actor. Collective."""
    pipeline, component = RUNS[name]
    model = load_component(out / "base" / pipeline, component)
    # What verl-omni saves: the loaded config, which tells where it was loaded from.
    config = {**model.config, "_class_name": type(model).__name__}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for module in model.children():
        if isinstance(module, torch.nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sum(o.pow(2).mean() for o in run_pipeline_forward(model, pipeline)).backward()
    optimizer.step()
    state = model.state_dict()
    if pipeline == "sd3":
        # A buffer that a run may well have changed: it must come from the checkpoint.
        state["pos_embed.pos_embed"] = state["pos_embed.pos_embed"] + 1
        model.pos_embed.pos_embed += 1
    full = full_state(state)
    with torch.no_grad():
        outputs = run_pipeline_forward(model, pipeline)
    save_actor(state, out / name / "actor", config=json.loads(json.dumps(config, default=list)))
    if dist.get_rank() == 0:
        save_file(
            {k: v.contiguous() for k, v in full.items()}, out / name / "reference.safetensors"
        )
        torch.save(outputs, out / name / "forward.pt")
    dist.barrier()


def main() -> None:
    """Build, train, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, str(BOOGU_PACKAGE))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        for name, make in PIPELINES.items():
            (arguments.out / "base" / name).mkdir(parents=True)
            make(arguments.out / "base" / name)
    dist.barrier()
    for name in RUNS:
        train_run(name, arguments.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
