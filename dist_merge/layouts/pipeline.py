"""The whole base pipeline with only the trained component's weights replaced."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import BaseModelError
from ..records import BaseModel


class PipelineLayout:
    """Every base file at its place; the new weights in the trained component's folder."""

    name = "pipeline"

    def artifact_type(self, base: BaseModel) -> str:
        """See `contracts.OutputLayout`; refuses a base that is no pipeline."""
        if not base.is_pipeline:
            raise BaseModelError(
                "base-not-a-pipeline",
                "the base is a lone transformer, so there is no pipeline to publish",
                hint="pass --output_format transformer, or the whole pipeline as --base_model",
            )
        return str(base.extra.get("artifact_type", "diffusers_pipeline"))

    def tensor_directory(self, base: BaseModel) -> str:
        """See `contracts.OutputLayout`."""
        return base.component_dir

    def weights_stem(self, base: BaseModel) -> str:
        """See `contracts.OutputLayout`."""
        return str(base.extra.get("weights_stem", "diffusion_pytorch_model"))

    def copies(self, base: BaseModel) -> Mapping[str, str]:
        """See `contracts.OutputLayout`."""
        return {file.path: file.path for file in base.files}
