"""Make the whole job as data: every output file, tensor, operation, box and sender.

Pure: no I/O, no communication. What this module returns is complete, or it raises.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from .adapters.export import make_adapter_shards, name_base
from .adapters.keys import sort_names
from .adapters.notes import describe_adapter
from .adapters.resolve import resolve_adapter
from .adapters.settings import ADAPTER_DIR, AdapterSettings
from .base_reader import is_base_file
from .contracts import Architecture, OutputLayout
from .errors import PlanError, make_list
from .operations import Apply, Cast, Expression, list_inputs, make_spec, substitute
from .plan_sources import make_source_tensors
from .records import (
    FLOATING_DTYPES,
    BaseModel,
    Bucket,
    MergePlan,
    OutputShard,
    OutputTensor,
    SourceInventory,
    TensorSpec,
    item_nbytes,
)
from .request import ModelMergerConfig


def make_plan(
    inventory: SourceInventory,
    *,
    base: BaseModel,
    architecture: Architecture,
    layout: OutputLayout,
    config: ModelMergerConfig,
    settings: AdapterSettings | None = None,
) -> MergePlan:
    """Match sources with the base's schema and lay out every output file.

    `settings` are the strength of the adapter, where the checkpoint has adapters.

    Raises:
        PlanError: Keys, shapes or dtypes of checkpoint and base do not match one to one, or the
            adapter cannot be right.
        SourceError: Boxes of a tensor leave a hole, overlap, or disagree.
    """
    notes: list[str] = []
    sources = make_source_tensors(inventory.shards, world_size=inventory.world_size, notes=notes)
    specs = {fqn: source.spec for fqn, source in sources.items()}
    resolved = resolve_adapter(
        sort_names(shard.fqn for shard in inventory.shards if not is_base_file(shard.source_file)),
        specs=specs,
        settings=settings,
        adapter=config.adapter_name,
        is_fused=config.fuse_lora,
        base_tensors=base.tensors,
    )
    model_specs = {name: make_spec(e, specs) for name, e in resolved.expressions.items()}
    expressions = architecture.make_expressions(base, model_specs)
    check_names(expressions, base=base, specs=model_specs)
    outputs = [
        make_output(
            name,
            substitute(expressions[name], resolved.expressions),
            specs=specs,
            base=base,
            config=config,
        )
        for name in sorted(expressions)
    ]
    directory = layout.tensor_directory(base)
    stem = layout.weights_stem(base)
    shards = split_output(
        outputs, directory=directory, stem=stem, max_nbytes=int(config.max_shard_size)
    )
    prefix = "" if directory == "." else f"{directory}/"
    changes = {
        output.name: (base.tensors[output.name].dtype, output.spec.dtype)
        for output in outputs
        if base.tensors[output.name].dtype != output.spec.dtype
    }
    return add_adapter(
        MergePlan(
            artifact_type=layout.artifact_type(base),
            architecture=base.pipeline_class or next(iter(architecture.pipelines)),
            tensor_directory=directory,
            sources=sources,
            output_shards=shards,
            index_path=f"{prefix}{stem}.safetensors.index.json" if len(shards) > 1 else None,
            buckets=(),
            dtype_changes=changes,
            notes=tuple(notes),
            adapter=resolved.plan,
            world_size=inventory.world_size,
        ),
        modules={name.rpartition(".")[0] for name in model_specs},
        config=config,
    )


def make_adapter_plan(
    inventory: SourceInventory,
    *,
    base: BaseModel | None,
    config: ModelMergerConfig,
    settings: AdapterSettings | None,
) -> MergePlan:
    """Plan the adapter folder of a checkpoint that holds adapters and nothing else.

    `base` is what the adapter is checked against, where it is at hand.

    Raises:
        PlanError: The adapter is incomplete or cannot be right.
        SourceError: Boxes of a tensor leave a hole, overlap, or disagree.
    """
    notes: list[str] = []
    sources = make_source_tensors(inventory.shards, world_size=inventory.world_size, notes=notes)
    resolved = resolve_adapter(
        sort_names(sources),
        specs={fqn: source.spec for fqn, source in sources.items()},
        settings=settings,
        adapter=config.adapter_name,
        is_fused=False,
        base_tensors=base.tensors if base is not None and not base.is_native else None,
    )
    return add_adapter(
        MergePlan(
            artifact_type="peft_adapter",
            architecture="peft",
            tensor_directory=ADAPTER_DIR,
            sources=sources,
            output_shards=(),
            index_path=None,
            buckets=(),
            dtype_changes={},
            notes=tuple(notes),
            adapter=resolved.plan,
            world_size=inventory.world_size,
        ),
        modules={name.rpartition(".")[0] for name in base.tensors} if base is not None else (),
        config=config,
    )


def add_adapter(plan: MergePlan, *, modules: Iterable[str], config: ModelMergerConfig) -> MergePlan:
    """Add the adapter folder's files, leave out unused sources, and cut everything into buckets."""
    specs = {fqn: source.spec for fqn, source in plan.sources.items()}
    shards = plan.output_shards
    if plan.adapter is not None and not plan.adapter.is_fused:
        shards += make_adapter_shards(
            plan.adapter, specs=specs, base_name=name_base(config.base_model), modules=modules
        )
    used = {fqn for shard in shards for tensor in shard.tensors for fqn in tensor.inputs}
    return replace(
        plan,
        sources={fqn: source for fqn, source in plan.sources.items() if fqn in used},
        output_shards=shards,
        buckets=make_buckets(shards, specs=specs, max_nbytes=int(config.buffer_size)),
        notes=(*plan.notes, *describe_adapter(plan.adapter)),
    )


def make_digest(plan: MergePlan) -> bytes:
    """Digest of everything in the plan, to be compared between ranks."""
    return hashlib.sha256(repr(plan).encode()).digest()


def check_names(
    expressions: Mapping[str, Expression], *, base: BaseModel, specs: Mapping[str, TensorSpec]
) -> None:
    """Check that every expected tensor is made once and every source tensor is used once."""
    used: dict[str, int] = defaultdict(int)
    for expression in expressions.values():
        for fqn in list_inputs(expression):
            used[fqn] += 1
    missing = {fqn for fqn in used if fqn not in specs}
    missing |= {name for name in base.tensors if name not in expressions}
    unexpected = {fqn for fqn in specs if used[fqn] == 0}
    unexpected |= {name for name in expressions if name not in base.tensors}
    if missing or unexpected:
        facts = []
        if missing:
            facts.append(f"{len(missing)} missing: {make_list(missing)}")
        if unexpected:
            facts.append(f"{len(unexpected)} unexpected: {make_list(unexpected)}")
        raise PlanError(
            "tensor-missing" if missing else "tensor-unexpected",
            "the checkpoint's tensors are not those of the base model",
            expected=f"the {len(base.tensors)} tensors of `{base.component}` in the base",
            found="; ".join(facts),
            hint="is this the base the run started from, and was the whole model saved?",
        )
    twice = {fqn for fqn, count in used.items() if count > 1}
    if twice:
        raise PlanError("tensor-used-twice", f"used by two outputs: {make_list(twice)}")


def make_output(
    name: str,
    expression: Expression,
    *,
    specs: Mapping[str, TensorSpec],
    base: BaseModel,
    config: ModelMergerConfig,
) -> OutputTensor:
    """Check one output tensor against the base's header and add the cast its dtype asks for."""
    expected = base.tensors[name]
    spec = make_spec(expression, specs)
    if spec.shape != expected.shape:
        raise PlanError(
            "shape-mismatch",
            f"tensor `{name}` has another shape than in the base model",
            expected=str(list(expected.shape)),
            found=str(list(spec.shape)),
            hint="checkpoint and base are of different sizes or versions",
        )
    floating = spec.dtype in FLOATING_DTYPES
    if floating != (expected.dtype in FLOATING_DTYPES) or (
        not floating and spec.dtype != expected.dtype
    ):
        raise PlanError(
            "dtype-mismatch",
            f"tensor `{name}` is of another kind than in the base model",
            expected=expected.dtype,
            found=spec.dtype,
        )
    wanted = choose_dtype(name, spec=spec, expected=expected, base=base, choice=config.dtype)
    if wanted != spec.dtype:
        expression = Apply(Cast(wanted), (expression,))
        spec = make_spec(expression, specs)
    return OutputTensor(name, spec, expression, list_inputs(expression))


def choose_dtype(
    name: str, *, spec: TensorSpec, expected: TensorSpec, base: BaseModel, choice: str
) -> str:
    """Dtype of one output tensor under `--dtype`; only floating tensors are ever cast.

    A package whose loaders fix every dtype takes the base's, whatever the choice.
    """
    if spec.dtype not in FLOATING_DTYPES:
        return spec.dtype
    if choice == "base" or base.extra.get("has_fixed_dtypes"):
        return expected.dtype
    if choice == "preserve":
        return spec.dtype
    island = any(part in base.keep_in_fp32 for part in name.split("."))
    return "float32" if island else choice


def split_output(
    outputs: Sequence[OutputTensor], *, directory: str, stem: str, max_nbytes: int
) -> tuple[OutputShard, ...]:
    """Fill output shards in name order, none above `max_nbytes` unless one tensor alone is.

    Within a file wide dtypes come first, so that every tensor lies aligned to its element size.
    """
    groups: list[list[OutputTensor]] = [[]]
    filled = 0
    for output in outputs:
        if groups[-1] and filled + output.spec.nbytes > max_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(output)
        filled += output.spec.nbytes
    prefix = "" if directory == "." else f"{directory}/"
    count = len(groups)
    shards = []
    for number, group in enumerate(groups, start=1):
        suffix = f"-{number:05d}-of-{count:05d}" if count > 1 else ""
        ordered = sorted(group, key=lambda o: (-item_nbytes(o.spec.dtype), o.name))
        path = f"{prefix}{stem}{suffix}.safetensors"
        shards.append(OutputShard(path, {"format": "pt"}, tuple(ordered)))
    return tuple(shards)


def make_buckets(
    shards: Sequence[OutputShard], *, specs: Mapping[str, TensorSpec], max_nbytes: int
) -> tuple[Bucket, ...]:
    """Cut every output shard into runs of tensors whose sources fit into one buffer."""
    buckets: list[Bucket] = []
    for number, shard in enumerate(shards):
        group: list[OutputTensor] = []
        filled = 0
        for output in shard.tensors:
            nbytes = sum(specs[fqn].nbytes for fqn in output.inputs)
            if group and filled + nbytes > max_nbytes:
                buckets.append(make_bucket(number, len(buckets), group))
                group, filled = [], 0
            group.append(output)
            filled += nbytes
        buckets.append(make_bucket(number, len(buckets), group))
    return tuple(buckets)


def make_bucket(output_shard: int, index: int, group: Sequence[OutputTensor]) -> Bucket:
    """Make one bucket."""
    inputs = tuple(fqn for output in group for fqn in output.inputs)
    return Bucket(output_shard, index, tuple(group), inputs)
