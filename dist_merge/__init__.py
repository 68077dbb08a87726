"""Turn a sharded training checkpoint into a verified model folder that can be deployed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import MergeError
    from .live.callback import PublishCallback
    from .live.publish import PublishHandle, publish_model, publish_model_async
    from .records import MergeResult
    from .request import ModelMergerConfig
    from .run import inspect_checkpoint, merge_model
    from .validate import validate_artifact

__version__ = "0.1.0"
__all__ = [
    "MergeError",
    "MergeResult",
    "ModelMergerConfig",
    "PublishCallback",
    "PublishHandle",
    "inspect_checkpoint",
    "merge_model",
    "publish_model",
    "publish_model_async",
    "validate_artifact",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use: `--help` need not load torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    # The callback needs transformers, so it is looked at last.
    for module in (
        "errors",
        "records",
        "request",
        "run",
        "validate",
        "live.publish",
        "live.callback",
    ):
        found = import_module(f"{__name__}.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(name)
