"""The trained component alone: `config.json`, weights, manifest."""

from __future__ import annotations

from collections.abc import Mapping

from ..records import BaseModel


class TransformerLayout:
    """The component's folder becomes the root of the output."""

    name = "transformer"

    def artifact_type(self, base: BaseModel) -> str:
        """See `contracts.OutputLayout`."""
        return "diffusers_transformer"

    def tensor_directory(self, base: BaseModel) -> str:
        """See `contracts.OutputLayout`."""
        return "."

    def weights_stem(self, base: BaseModel) -> str:
        """See `contracts.OutputLayout`."""
        return "diffusion_pytorch_model"

    def copies(self, base: BaseModel) -> Mapping[str, str]:
        """See `contracts.OutputLayout`; Python files are there only when they were trusted."""
        prefix = f"{base.component_dir}/" if base.is_pipeline else ""
        kept = (f.path for f in base.files if f.path.startswith(prefix))
        return {
            path: path.removeprefix(prefix)
            for path in kept
            if path == f"{prefix}config.json" or path.endswith(".py")
        }
