"""The table of docs/architectures.md, from the registry and the end-to-end cases.

`python -m tests.helpers.architecture_table` writes it into the page.
"""

from __future__ import annotations

from pathlib import Path

from dist_merge.architectures import ARCHITECTURES
from dist_merge.contracts import Architecture

from .tiny_transformers import list_all

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
START, END = "<!-- table: start -->\n", "<!-- table: end -->\n"
# Transformer class -> pipelines that go through a whole merge in tests/end_to_end.
WHOLE = {
    "QwenImageTransformer2DModel": ("QwenImagePipeline", "QwenImageEditPipeline"),
    "SD3Transformer2DModel": ("StableDiffusion3Pipeline",),
    "FluxTransformer2DModel": ("FluxPipeline",),
    "WanTransformer3DModel": ("WanPipeline", "WanImageToVideoPipeline"),
    "LTX2VideoTransformer3DModel": ("LTX2Pipeline",),
    "MiniMaxH3Transformer3DModel": (),
    "BooguImageTransformer2DModel": ("BooguImagePipeline",),
}


def tested_transformers() -> set[str]:
    """Classes that are trained, merged and reloaded as lone transformers."""
    return {tiny.class_name for tiny in list_all().values()} | set(WHOLE)


def describe_tests(architecture: Architecture, pipeline: str) -> str:
    """How one pipeline of a family is tested."""
    if architecture.trained_class != architecture.transformer_class:
        return "real run to native package"
    if pipeline in WHOLE.get(architecture.transformer_class, ()):
        return "real run to reloaded pipeline and transformer"
    if architecture.transformer_class in tested_transformers():
        return "transformer: real run to reloaded; pipeline: components against its class"
    return "not tested"


def make_table() -> str:
    """The table, one row per pipeline class."""
    rows = [
        "| pipeline class | transformer class | layouts | tested |",
        "| --- | --- | --- | --- |",
    ]
    for architecture in ARCHITECTURES:
        layouts = ", ".join(architecture.output_formats)
        for pipeline in architecture.pipelines or ("",):
            rows.append(
                f"| {pipeline or '(none)'} | {architecture.transformer_class} | {layouts} "
                f"| {describe_tests(architecture, pipeline)} |"
            )
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the table into the page."""
    head, _, rest = PAGE.read_text().partition(START)
    _, _, tail = rest.partition(END)
    PAGE.write_text(head + START + make_table() + END + tail)


if __name__ == "__main__":
    main()
