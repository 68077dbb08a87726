"""A model card for artifacts that carry none: what it is, how to load it, what it was made from.

It is made for the hub only; the published folder holds nothing but what its manifest lists.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .adapters.settings import ADAPTER_DIR, CONFIG_NAME
from .architectures import find_trained
from .files import read_json
from .manifest import Manifest

CARD_NAME = "README.md"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
LICENSE_FIELDS = ("license", "license_name", "license_link")


def make_card(
    folder: Path, manifest: Manifest, *, repo_id: str, base_model: str | Path | None
) -> bytes | None:
    """Make the model card of an adapter or a lone transformer.

    Args:
        folder: The published folder (of an adapter, the one with its weights).
        manifest: Its manifest.
        repo_id: Repository it is for.
        base_model: Base as the user named it: a name on the hub, or a folder.

    Returns:
        UTF-8 Markdown with YAML front matter; None where the folder has a card of its own, or
        holds a whole pipeline.
    """
    if not needs_card(manifest):
        return None
    from huggingface_hub import ModelCardData

    base = find_hub_name(base_model)
    if base is None and (folder / CONFIG_NAME).is_file():
        base = find_hub_name(read_json(folder / CONFIG_NAME).get("base_model_name_or_path"))
    library, tags, relation, loading = _DESCRIBE[manifest.artifact_type](
        folder, manifest, repo_id=repo_id, base=base
    )
    data = ModelCardData(
        base_model=base,
        base_model_relation=relation if base is not None else None,
        library_name=library,
        tags=[*tags, "dist_merge"],
        **read_license(base_model),
    )
    lines = ["---", data.to_yaml(), "---", "", f"# {repo_id.rpartition('/')[2]}", "", *loading]
    return "\n".join([*lines, "", *describe_origin(manifest), ""]).encode()


def needs_card(manifest: Manifest) -> bool:
    """Whether an artifact is of a kind that gets a card and has none of its own."""
    return CARD_NAME not in manifest.files and manifest.artifact_type in _DESCRIBE


def find_hub_name(base_model: str | Path | None) -> str | None:
    """Name of the base on a hub, where that is certain; never a local path.

    A folder's name is known from the layout of the hub's cache only
    (`models--ORG--NAME/snapshots/REVISION`).
    """
    if base_model is None:
        return None
    path = Path(base_model)
    if not path.exists():
        return str(base_model) if _HUB_NAME.fullmatch(str(base_model)) else None
    parts = path.absolute().parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        name = parts[-3].removeprefix("models--").replace("--", "/")
        return name if _HUB_NAME.fullmatch(name) else None
    return None


def read_license(base_model: str | Path | None) -> dict[str, Any]:
    """Licence fields of the base's own card; empty where there are none."""
    import yaml
    from huggingface_hub import metadata_load

    path = Path(base_model) / CARD_NAME if base_model is not None else None
    if path is None or not path.is_file():
        return {}
    try:
        data: Any = metadata_load(path) or {}
    except (ValueError, OSError, yaml.YAMLError):
        return {}  # a card is made by hand; a slip in it is no reason to stop here
    return {name: data[name] for name in LICENSE_FIELDS if isinstance(data.get(name), str)}


def _describe_adapter(
    folder: Path, manifest: Manifest, *, repo_id: str, base: str | None
) -> tuple[str, list[str], str, list[str]]:
    """Library, tags, relation to the base and text of an adapter's card."""
    model = base or "BASE_MODEL"
    text = [
        "LoRA adapter for a diffusion transformer.",
        "",
        "```python",
        "from diffusers import DiffusionPipeline",
        "",
        f'pipeline = DiffusionPipeline.from_pretrained("{model}")',
        f'pipeline.load_lora_weights("{repo_id}")',
        "```",
        "",
        "With PEFT, on the transformer itself:",
        "",
        "```python",
        "from peft import PeftModel",
        "",
        f'model = PeftModel.from_pretrained(pipeline.transformer, "{repo_id}")',
        "```",
    ]
    return "peft", ["lora", "diffusers"], "adapter", text


def _describe_transformer(
    folder: Path, manifest: Manifest, *, repo_id: str, base: str | None
) -> tuple[str, list[str], str, list[str]]:
    """Library, tags, relation to the base and text of a lone transformer's card."""
    config = folder / manifest.tensor_directory / "config.json"
    name = str(read_json(config).get("_class_name"))
    architecture = find_trained(name)
    text = [f"The transformer (`{name}`) of a pipeline, without its other components."]
    if architecture is not None and architecture.module.split(".")[0] == "diffusers":
        text += [
            "",
            "```python",
            f"from diffusers import {name}",
            "",
            f'transformer = {name}.from_pretrained("{repo_id}")',
            "```",
        ]
    if f"{ADAPTER_DIR}/{CONFIG_NAME}" in manifest.files:
        text += ["", f"`{ADAPTER_DIR}` holds a LoRA adapter, which is **not** folded in."]
    return "diffusers", [], "finetune", text


_DESCRIBE = {"peft_adapter": _describe_adapter, "diffusers_transformer": _describe_transformer}


def describe_origin(manifest: Manifest) -> list[str]:
    """Provenance, from the manifest."""
    data = manifest.data
    rows = {
        "artifact": manifest.artifact_type,
        "architecture": manifest.architecture,
        "trained component": ", ".join(data["trained_components"]),
        "tensors": str(len(manifest.tensors)),
        "checkpoint": f"`{data['source_fingerprint']}`",
    }
    if data["base_files"]:
        rows["base"] = f"`{data['base_fingerprint']}`"
    if "adapter_name" in data:
        rows["adapter"] = str(data["adapter_name"])
    fusion = data.get("lora_fusion")
    if fusion is not None:
        rows["folded-in adapter"] = (
            f"{fusion['adapter_name']}, r {fusion['r']}, alpha {fusion['lora_alpha']:g}"
        )
    rows["made with"] = ", ".join(f"{n} {v}" for n, v in sorted(data["producer"].items()))
    return [
        "## Origin",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        "Checkpoint and base are fingerprints (SHA256 over the hashes of their files); every file "
        "and tensor is listed in `merge_manifest.json`.",
    ]
