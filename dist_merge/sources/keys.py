"""State-dict keys without the segments that training wrappers add."""

from __future__ import annotations

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


def clean_key(key: str) -> str:
    """Remove wrapper segments anywhere, a leading `module`, and a leading `base_model.model`.

    Whole path segments only: `my_orig_mod` stays.
    """
    parts = [part for part in key.split(".") if part not in WRAPPERS]
    if len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    if len(parts) > 2 and parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    return ".".join(parts)
