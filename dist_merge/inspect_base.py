"""Describe the base model: configs, headers, class facts, and what becomes of every file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architectures import find_architecture, find_by_pipeline
from .base_files import check_remote_code, describe_files, find_edited_configs, sort_files
from .base_weights import ComponentWeights, join, read_component_weights, read_small_tensor
from .contracts import Architecture
from .errors import BaseModelError, make_list
from .files import read_json, walk_files
from .model_class import ClassFacts, read_class_facts
from .operations import list_inputs, make_spec
from .pipeline_checks import MODEL_INDEX, check_components, split_index
from .records import BaseModel, TensorSpec


@dataclass(frozen=True)
class PipelineFacts:
    """What `model_index.json` says; `components` are those that are present."""

    class_name: str
    index: Mapping[str, Any]
    components: frozenset[str]


def read_base(
    base_dir: Path, *, component: str, output_format: str | None, trust_remote_code: bool
) -> BaseModel:
    """Read and check a base pipeline, or a lone transformer. Headers only, no tensor bytes.

    Without `output_format` nothing is published of the base: only its schema is read.

    Raises:
        BaseModelError: The base is incomplete, contradicts itself, or is not supported.
        ArtifactError: The folder holds links to folders or damaged files.

    Ranks: rank 0 only.
    """
    paths = walk_base(base_dir)
    is_pipeline = MODEL_INDEX in paths
    folder = component if is_pipeline else "."
    config = read_component_config(base_dir, folder=folder, paths=paths)
    architecture = find_architecture(config["_class_name"])
    if output_format is not None:
        check_output_format(architecture, is_pipeline=is_pipeline, output_format=output_format)
    pipeline = None
    if is_pipeline:
        pipeline = read_pipeline(
            base_dir,
            architecture=architecture,
            component=component,
            paths=paths,
            is_copied=output_format == "pipeline",
        )
    weights = read_component_weights(
        base_dir, folder=folder, paths=paths, stems=architecture.weights_stems
    )
    trained_config = architecture.make_config(config)
    facts = read_class_facts(architecture, trained_config)
    if facts is not None:
        weights = drop_ignored(weights, facts)
    files = sort_files(
        paths,
        folder=folder,
        components=pipeline.components if pipeline and output_format == "pipeline" else None,
    )
    if output_format is not None:
        check_remote_code(files.copied, trust_remote_code=trust_remote_code)
    base = BaseModel(
        is_pipeline=is_pipeline,
        pipeline_class=pipeline.class_name if pipeline else None,
        transformer_class=architecture.transformer_class,
        trained_class=architecture.trained_class,
        component=component,
        component_dir=folder,
        config=trained_config,
        config_defaults=facts.defaults if facts else None,
        tensors={name: weights.tensors[name] for name in sorted(weights.tensors)},
        tensor_files={name: weights.files[name] for name in sorted(weights.tensors)},
        keep_in_fp32=choose_islands(architecture, facts),
        files=describe_files(base_dir, files.copied),
        replaced=describe_files(base_dir, files.replaced),
        left_out=files.left_out,
        edited_configs=find_edited_configs(base_dir, files.copied),
        model_class_check="passed"
        if facts
        else f"not_run: class {architecture.trained_class} cannot be imported here",
        extra={
            "weights_stem": weights.stem,
            "artifact_type": architecture.artifact_type,
            "has_fixed_dtypes": architecture.has_fixed_dtypes,
            "model_index": dict(pipeline.index) if pipeline else None,
            "unused_config_fields": list(facts.unused_fields) if facts else [],
            "constants": {
                name: read_small_tensor(base_dir, weights=weights, name=name)
                for name in architecture.constants
            },
        },
    )
    if facts is not None:
        check_class(base, facts, architecture)
    return base


def walk_base(base_dir: Path) -> list[str]:
    """List the files of the base."""
    if base_dir.is_dir():
        paths = walk_files(base_dir)
        if MODEL_INDEX in paths or "config.json" in paths:
            return paths
    raise BaseModelError(
        "base-not-a-model",
        "the base is neither a Diffusers pipeline nor a lone transformer",
        where=f"`{base_dir}`",
        expected=f"a folder with `{MODEL_INDEX}`, or with `config.json`",
        found="no such files" if base_dir.is_dir() else "no such folder",
        hint="pass the folder of a downloaded model; a name on a hub is not fetched",
    )


def read_component_config(base_dir: Path, *, folder: str, paths: Sequence[str]) -> dict[str, Any]:
    """Read the trained component's config, which must name its class and not be quantised."""
    path = join(folder, "config.json")
    if path not in paths:
        raise BaseModelError(
            "component-missing",
            f"the base has no component `{folder}`",
            where=f"`{path}`",
            hint="choose another --component, or download the whole base model",
        )
    config = read_json(base_dir / path, kind=BaseModelError)
    if not isinstance(config, dict) or not isinstance(config.get("_class_name"), str):
        raise BaseModelError(
            "base-not-a-model",
            "the component's config names no class",
            where=f"`{path}`",
            expected="`_class_name`, as Diffusers writes it",
            hint="pass a Diffusers pipeline or transformer",
        )
    if config.get("quantization_config") is not None:
        raise BaseModelError(
            "base-quantised",
            "the trained component of the base is quantised",
            where=f"`{path}`",
            found="`quantization_config`",
            hint="use the base in its original precision",
        )
    return config


def check_output_format(
    architecture: Architecture, *, is_pipeline: bool, output_format: str
) -> None:
    """Check that the base can become the wanted kind of output."""
    if output_format not in architecture.output_formats:
        raise BaseModelError(
            "format-unsupported",
            f"output format `{output_format}` cannot be made from this base "
            f"(`{architecture.transformer_class}`)",
            expected=make_list(architecture.output_formats),
            hint="choose another --output_format, or the other form of the base model",
        )
    if output_format == "pipeline" and not is_pipeline:
        raise BaseModelError(
            "base-not-a-pipeline",
            "a pipeline is wanted, but the base is a lone transformer",
            expected=f"a folder with `{MODEL_INDEX}`",
            hint="pass the whole pipeline as --base_model, or --output_format transformer",
        )


def read_pipeline(
    base_dir: Path,
    *,
    architecture: Architecture,
    component: str,
    paths: Sequence[str],
    is_copied: bool,
) -> PipelineFacts:
    """Read `model_index.json` and check it against the declared pipeline.

    The frozen components are checked only where they will be copied.
    """
    index = read_json(base_dir / MODEL_INDEX, kind=BaseModelError)
    class_name = index.get("_class_name") if isinstance(index, dict) else None
    if not isinstance(class_name, str):
        raise BaseModelError(
            "base-not-a-model", "the index names no pipeline class", where=f"`{MODEL_INDEX}`"
        )
    if class_name not in architecture.pipelines:
        owner = find_by_pipeline(class_name)
        raise make_class_error(
            f"pipeline `{class_name}` does not belong to the class of its `{component}`",
            expected=owner.transformer_class,
            found=architecture.transformer_class,
        )
    spec = architecture.pipelines[class_name]
    if not is_copied:
        index = {name: index[name] for name in index if name == component}
    components = split_index(index, spec, needs_all=is_copied)
    if component not in components:
        raise BaseModelError(
            "component-missing",
            f"the pipeline has no component `{component}`",
            where=f"`{MODEL_INDEX}`",
            found=make_list(components, limit=20),
            hint="choose another --component",
        )
    if components[component][1] != architecture.transformer_class:
        raise make_class_error(
            f"index and config disagree on the class of `{component}`",
            expected=f"{components[component][1]} as in `{MODEL_INDEX}`",
            found=f"{architecture.transformer_class} in `{component}/config.json`",
        )
    if is_copied:
        check_components(base_dir, components=components, spec=spec, paths=paths, trained=component)
    return PipelineFacts(class_name, index, frozenset(components))


def make_class_error(what: str, *, expected: str, found: str) -> BaseModelError:
    """Make the error for two places that name different classes."""
    return BaseModelError("class-mismatch", what, expected=expected, found=found)


def choose_islands(architecture: Architecture, facts: ClassFacts | None) -> tuple[str, ...]:
    """Fp32 islands: the class knows them best, but only in its own names."""
    is_native = architecture.trained_class != architecture.transformer_class
    return architecture.keep_in_fp32 if facts is None or is_native else facts.keep_in_fp32


def drop_ignored(weights: ComponentWeights, facts: ClassFacts) -> ComponentWeights:
    """Return the weights without tensors that the class skips when it loads."""
    tensors = {n: spec for n, spec in weights.tensors.items() if not facts.is_ignored(n)}
    return ComponentWeights(weights.stem, tensors, weights.files)


def check_class(base: BaseModel, facts: ClassFacts, architecture: Architecture) -> None:
    """Check that the state dict of the class makes exactly the tensors in the base's headers.

    Raises:
        BaseModelError: Names or shapes differ.
    """
    sources = {name: TensorSpec(shape, "float32") for name, shape in facts.shapes.items()}
    expressions = architecture.make_expressions(base, sources)
    used = {fqn for expression in expressions.values() for fqn in list_inputs(expression)}
    missing, unexpected = set(sources) - used, used - set(sources)
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {make_list(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {make_list(unexpected)}")
    for name, expression in sorted(expressions.items()) if not unexpected else ():
        found, wanted = base.tensors[name].shape, make_spec(expression, sources).shape
        if found != wanted:
            problems.append(f"`{name}` is {list(found)}, not {list(wanted)}")
            break
    if problems:
        raise BaseModelError(
            "base-class-mismatch",
            "the base's weights are not those that its class and config.json make",
            expected=f"the {len(sources)} tensors of {architecture.trained_class}",
            found="; ".join(problems),
            hint="weights and config.json are from different models or versions",
        )
