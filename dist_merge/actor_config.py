"""The trained model's own config, and whether it describes the same model as the base's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import BaseModelError, SourceError, make_list
from .files import read_json
from .records import BaseModel

# Where a model came from. Like every field that starts with `_` (Diffusers' own book-keeping, such
# as `_diffusers_version` and `_use_default_values`) it does not change what the model does.
NEUTRAL_FIELDS = frozenset({"name_or_path"})
ABSENT = "(absent)"


def read_actor_config(folder: Path) -> tuple[dict[str, Any], str]:
    """Read `config.json` of the actor; returns it and the file's SHA256.

    Raises:
        SourceError: It is missing or no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise SourceError(
            "actor-config-missing",
            "the trained model's config.json is missing",
            where=f"`{path}`",
            hint="pass the folder that holds it as --hf_model_config_path",
        )
    data = read_json(path, kind=SourceError)
    if not isinstance(data, dict):
        raise SourceError("bad-json", "config.json is no JSON object", where=f"`{path}`")
    return data, hashlib.sha256(path.read_bytes()).hexdigest()


def check_actor_config(actor: Mapping[str, Any], base: BaseModel) -> None:
    """Check that actor and base describe the same model.

    Raises:
        BaseModelError: Another class, a field the class does not know, or another behaviour.
    """
    actor_class = str(actor.get("_class_name"))
    trained_class = base.trained_class or base.transformer_class
    # fully_shard renames the class of the live module it wraps.
    if trained_class not in (actor_class, actor_class.removeprefix("FSDP")):
        raise BaseModelError(
            "class-mismatch",
            "checkpoint and base model are of different classes",
            expected=trained_class,
            found=f"{actor_class} in the checkpoint's config",
            hint="pass the base model the run started from",
        )
    defaults = base.config_defaults
    configs = {"checkpoint": strip(actor), "base model": strip(base.config)}
    # Published configs carry fields their class ignores; both sides may, with any value.
    unused = set(base.extra.get("unused_config_fields", ()))
    for config in configs.values():
        for name in unused & set(config):
            del config[name]
    if defaults is not None:
        for owner, config in configs.items():
            unknown = {name for name in config if name not in defaults}
            if unknown:
                raise BaseModelError(
                    "config-field-unknown",
                    f"{trained_class} has no config field {make_list(unknown)}",
                    where=f"config.json of the {owner}",
                    hint="it needs another Diffusers release, or is not this model's config",
                )
    here, there = (fill(config, defaults) for config in configs.values())
    differing = [
        f"`{name}`: {here.get(name, ABSENT)!r} in the checkpoint, "
        f"{there.get(name, ABSENT)!r} in the base"
        for name in sorted(set(here) | set(there))
        if here.get(name, ABSENT) != there.get(name, ABSENT)
    ]
    if differing:
        raise BaseModelError(
            "config-mismatch",
            "checkpoint and base model are configured differently",
            found="; ".join(differing[:8]),
            hint="pass the base model the run started from",
        )


def strip(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that decide behaviour, as plain JSON values."""
    return {
        name: as_json(value)
        for name, value in config.items()
        if not name.startswith("_") and name not in NEUTRAL_FIELDS
    }


def fill(config: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add the class's defaults for absent fields."""
    known = {name: as_json(value) for name, value in (defaults or {}).items()}
    return {**known, **config}


def as_json(value: Any) -> Any:
    """Make tuples lists, as JSON has only those."""
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return value
