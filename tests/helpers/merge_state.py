"""Merge rank files of made-up tensors with the real steps; plain or under torchrun.

    merge_state WRITTEN OUT LAYOUT... OPTION=VALUE...

WRITTEN holds `reference.safetensors`, the schema of all layouts, and `<layout>/actor`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def merge_layouts(
    written: Path, out: Path, layouts: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Merge every layout with the real steps and a base made from the reference's schema."""
    from dist_merge.adapters.keys import sort_names
    from dist_merge.architectures.identity import IdentityArchitecture
    from dist_merge.contracts import PipelineSpec
    from dist_merge.group import open_group
    from dist_merge.inspect_sources import inspect_sources
    from dist_merge.job import run_interruptibly
    from dist_merge.layouts import LAYOUTS as OUTPUT_LAYOUTS
    from dist_merge.merge_job import FileInput, Job
    from dist_merge.plan import make_plan
    from dist_merge.publish import Staging
    from dist_merge.records import BaseModel
    from dist_merge.request import ModelMergerConfig
    from dist_merge.run import MergeRun
    from dist_merge.safetensors_header import read_header

    schema = read_header(written / "reference.safetensors").tensors
    base = BaseModel(
        is_pipeline=False,
        pipeline_class=None,
        transformer_class="Odd",
        component="transformer",
        component_dir=".",
        config={},
        config_defaults=None,
        tensors={name: entry.spec for name, entry in schema.items()},
        tensor_files={},
        keep_in_fp32=(),
        files=(),
        replaced=(),
        left_out=(),
        edited_configs={},
        model_class_check="not_run: no class",
    )
    odd = IdentityArchitecture(
        name="Odd",
        transformer_class="Odd",
        module="nowhere",
        pipelines={"OddPipeline": PipelineSpec({})},
    )

    def merge(layout: str, group: Any) -> None:
        config = ModelMergerConfig(
            local_dir=written / layout / "actor",
            target_dir=out / layout,
            base_model=written,
            output_format="transformer",
            trust_checkpoint=True,
            max_shard_size=300_000,
            buffer_size=200_000,
            quiet=True,
            **options,
        )
        run = MergeRun(config, group=group, source=FileInput(config))
        run.sources = sources = inspect_sources(config, group=group)
        plan = make_plan(
            sources.inventory,
            base=base,
            architecture=odd,
            layout=OUTPUT_LAYOUTS["transformer"],
            config=config,
        )
        run.staging = run.on_rank_0("stage", lambda: Staging.create(out / layout))
        transport = group.prepare("open-transport", run.open_transport)
        job = Job(config, sources, base, sort_names(plan.sources), None)
        run.merge_shards(plan, job, transport=transport)
        run.on_rank_0("publish", run.publish)
        group.agree("end")

    for layout in layouts:
        with open_group(timeout=60) as group:
            run_interruptibly(group, lambda n=layout, g=group: merge(n, g), clean_up=lambda: None)


if __name__ == "__main__":
    import torch.distributed as dist

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    words = [argument.partition("=") for argument in sys.argv[3:]]
    merge_layouts(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        [word for word, equals, _ in words if not equals],
        {name: value for name, equals, value in words if equals},
    )
