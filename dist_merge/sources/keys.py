"""State-dict keys without the segments that training wrappers add."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import SourceError

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
REMOVED_NOTE = "removed wrapper names from tensor names"


def clean_key(key: str) -> str:
    """Remove wrapper segments anywhere, a leading `module` and a leading `base_model.model`.

    Those two may stand in either order. Whole path segments only: `my_orig_mod` stays, and so does
    a name of which nothing would be left.
    """
    parts = [part for part in key.split(".") if part not in WRAPPERS]
    for wrapper in (["module"], ["base_model", "model"], ["module"]):
        count = len(wrapper)
        if len(parts) > count and parts[:count] == wrapper:
            parts = parts[count:]
    return ".".join(parts) or key


def clean_names(keys: Iterable[str], *, where: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Map cleaned names to the keys they come from; also notes about what was removed.

    Raises:
        SourceError: Two keys have the same cleaned name.
    """
    names: dict[str, str] = {}
    for key in keys:
        fqn = clean_key(key)
        if fqn in names:
            raise SourceError(
                "key-collision",
                f"two tensors have the name `{fqn}` once wrappers are removed",
                where=where,
                found=f"`{names[fqn]}` and `{key}`",
            )
        names[fqn] = key
    is_changed = any(fqn != key for fqn, key in names.items())
    return names, (REMOVED_NOTE,) if is_changed else ()
