"""The families' declarations against the classes of the installed Diffusers."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

from dist_merge.architectures import ARCHITECTURES, find_by_pipeline
from dist_merge.contracts import Architecture
from dist_merge.pipeline_checks import is_same_class

# Pipelines of other packages, and a modular one whose parts are no arguments of its constructor.
ELSEWHERE = {
    "BooguImagePipeline",
    "BooguImageTurboPipeline",
    "MiniMaxH3Pipeline",
    "MiniMaxH3ModularPipeline",
}
# Transformers that are no classes of the installed Diffusers.
FOREIGN = {"BooguImageTransformer2DModel", "MiniMaxH3DiTModel"}
# Annotations that say nothing about the class that is saved.
GENERAL = {"PreTrainedModel", "ProcessorMixin", "KarrasDiffusionSchedulers"}
DECLARED = {
    name: architecture
    for architecture in ARCHITECTURES
    for name in architecture.pipelines
    if name not in ELSEWHERE
}


def read_parameters(pipeline_class: str) -> dict[str, str]:
    """Arguments of a Diffusers pipeline's constructor: name -> annotation."""
    import diffusers

    parameters = inspect.signature(getattr(diffusers, pipeline_class).__init__).parameters
    return {name: str(p.annotation) for name, p in parameters.items() if name != "self"}


def list_classes(annotation: str) -> set[str]:
    """Class names in an annotation, without modules and typing's own words."""
    names = {part.rsplit(".", 1)[-1] for part in re.findall(r"[\w.]+", annotation)}
    return {n for n in names if n[:1].isupper()} - {"None", "Optional", "Union", "List", "Tuple"}


@pytest.mark.parametrize("name", DECLARED)
def test_components_are_those_of_the_pipeline_class(name: str) -> None:
    """Catches a misspelled pipeline, and components, options or optional parts that differ."""
    import diffusers

    spec = DECLARED[name].pipelines[name]
    assert set(read_parameters(name)) == set(spec.components) | set(spec.options)
    assert set(getattr(diffusers, name)._optional_components) == spec.optional


@pytest.mark.parametrize("name", DECLARED)
def test_component_classes_accept_what_the_pipeline_class_annotates(name: str) -> None:
    """Catches a published base refused for a class that its pipeline takes."""
    spec = DECLARED[name].pipelines[name]
    for component, annotation in read_parameters(name).items():
        if component in spec.options:
            continue
        refused = {
            class_name
            for class_name in list_classes(annotation) - GENERAL
            if not any(is_same_class(class_name, p) for p in spec.components[component])
        }
        assert refused == set(), component


def test_every_pipeline_of_a_registered_transformer_is_registered() -> None:
    """Catches a pipeline of a known transformer that a family forgot."""
    import diffusers

    known = {a.transformer_class for a in ARCHITECTURES}
    found = set()
    for name in dir(diffusers):
        if name.endswith("Pipeline") and hasattr(getattr(diffusers, name), "_optional_components"):
            classes = (list_classes(a) for a in read_parameters(name).values())
            if known & set().union(*classes):
                found.add(name)
    assert found - set(DECLARED) == set()
    assert len(found) >= 60


@pytest.mark.parametrize(
    "architecture",
    [a for a in ARCHITECTURES if a.transformer_class not in FOREIGN],
    ids=lambda a: a.name,
)
def test_fp32_islands_are_those_of_the_class(architecture: Architecture) -> None:
    """Catches islands that are rounded where the class cannot be imported, and a wrong module."""
    module = importlib.import_module(architecture.module)
    cls: Any = getattr(module, architecture.transformer_class)
    assert set(architecture.keep_in_fp32) == set(cls._keep_in_fp32_modules or ())


@pytest.mark.parametrize(
    ("pipeline", "component", "class_name"),
    [
        ("ZImagePipeline", "text_encoder", "Qwen3Model"),
        ("ZImagePipeline", "tokenizer", "Qwen2TokenizerFast"),
        ("HunyuanVideo15Pipeline", "tokenizer", "Qwen2TokenizerFast"),
        ("HunyuanVideo15Pipeline", "tokenizer_2", "ByT5Tokenizer"),
        ("CogVideoXPipeline", "scheduler", "CogVideoXDPMScheduler"),
        ("CogVideoXPipeline", "tokenizer", "T5TokenizerFast"),
        ("ChromaPipeline", "tokenizer", "T5TokenizerFast"),
        ("SanaPipeline", "tokenizer", "GemmaTokenizerFast"),
        ("SanaPipeline", "text_encoder", "Gemma2Model"),
        ("OvisImagePipeline", "tokenizer", "Qwen2TokenizerFast"),
        ("CosmosTextToWorldPipeline", "scheduler", "EDMEulerScheduler"),
        ("CosmosTextToWorldPipeline", "tokenizer", "T5TokenizerFast"),
        ("Cosmos2_5_PredictBasePipeline", "tokenizer", "Qwen2TokenizerFast"),
        ("Kandinsky5T2VPipeline", "tokenizer", "Qwen2_5_VLProcessor"),
        ("HiDreamImagePipeline", "tokenizer_4", "LlamaTokenizerFast"),
        ("HiDreamImagePipeline", "tokenizer_4", "PreTrainedTokenizerFast"),
        ("QwenImage21Pipeline", "processor", "Qwen3VLProcessor"),
    ],
)
def test_published_class_names_are_accepted(pipeline: str, component: str, class_name: str) -> None:
    """Catches a base refused for the name that another Transformers release wrote."""
    patterns = find_by_pipeline(pipeline).pipelines[pipeline].components[component]
    assert any(is_same_class(class_name, pattern) for pattern in patterns)
    assert not any(is_same_class(f"{class_name}X", p) for p in patterns if "*" not in p)
