"""Publish from a Transformers `Trainer`, or any loop with its callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .publish import publish_model


class PublishCallback(TrainerCallback):
    """Publishes at every save, to `target_dir/step-N`.

    Args:
        base_model: The base pipeline, or lone transformer.
        target_dir: Folder of the publishes; made if it is missing.
        **options: Those of `publish_model`.

    Ranks: the trainer calls it on all of them.
    """

    def __init__(self, *, base_model: Any, target_dir: Any, **options: Any) -> None:
        self.base_model = base_model
        self.target_dir = Path(target_dir)
        self.options = options

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the model as it is at this step."""
        if state.is_world_process_zero:
            self.target_dir.mkdir(parents=True, exist_ok=True)
        publish_model(
            kwargs["model"],
            base_model=self.base_model,
            target_dir=self.target_dir / f"step-{state.global_step}",
            **self.options,
        )
