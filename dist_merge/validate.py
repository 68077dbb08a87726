"""Recheck a published folder alone: files, hashes, headers, index, configs against the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .adapters.export import (
    DIFFUSERS_METADATA,
    DIFFUSERS_PREFIX,
    DIFFUSERS_WEIGHTS,
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    encode_metadata,
)
from .adapters.settings import ADAPTER_DIR, CONFIG_NAME
from .errors import ArtifactError, make_list
from .files import LOCATION_FIELDS, is_config, read_json, sha256_file, walk_files
from .load_check import check_load
from .manifest import MANIFEST_NAME, Manifest, parse_manifest
from .records import TensorSpec
from .safetensors_header import read_header

ADAPTER = "peft_adapter"


def validate_artifact(path: str | Path) -> dict[str, Any]:
    """Recheck a published folder without the sources.

    Args:
        path: The published folder.

    Returns:
        What was found and checked, as JSON-ready data.

    Raises:
        ArtifactError: The folder differs from its manifest in any file, name, shape or dtype.
    """
    folder = Path(path)
    if is_adapter_alone(folder):
        folder = folder / ADAPTER_DIR
    if not (folder / MANIFEST_NAME).is_file() or folder.is_symlink():
        raise ArtifactError(
            "manifest-missing",
            "this is no folder published by dist_merge",
            where=f"`{folder}`",
            expected=f"a folder with `{MANIFEST_NAME}`",
            hint="pass the merge's target folder",
        )
    report = check_folder(folder)
    data = read_json(folder / MANIFEST_NAME)
    if data["artifact_type"] == ADAPTER:
        return report
    if f"{ADAPTER_DIR}/{MANIFEST_NAME}" in data["files"]:
        report["adapter"] = check_folder(folder / ADAPTER_DIR)
    tensors = {n: TensorSpec(tuple(t["shape"]), t["dtype"]) for n, t in data["tensors"].items()}
    report["checks"]["load"] = check_load(
        folder, directory=data["tensor_directory"], tensors=tensors
    )
    return report


def is_adapter_alone(folder: Path) -> bool:
    """Tell whether a folder holds a published adapter folder and nothing else."""
    return (
        (folder / ADAPTER_DIR / MANIFEST_NAME).is_file()
        and not folder.is_symlink()
        and [entry.name for entry in folder.iterdir()] == [ADAPTER_DIR]
    )


def check_folder(folder: Path, *, known_sha256: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Check a folder against the manifest in it.

    Args:
        folder: Published or staged folder.
        known_sha256: Hashes already proven by reading the files back; those files are not read
            again. Empty for a published folder.

    Raises:
        ArtifactError: With the first difference.
    """
    manifest = parse_manifest(read_json(folder / MANIFEST_NAME))
    check_listing(folder, manifest)
    for name, sha256 in sorted(manifest.files.items()):
        found = (known_sha256 or {}).get(name) or sha256_file(folder / name)
        if found != sha256:
            raise ArtifactError(
                "file-changed",
                "a file differs from the manifest",
                where=f"`{name}`",
                expected=f"SHA256 {sha256}",
                found=f"SHA256 {found}",
                hint="the file was damaged or edited after publishing; fetch or publish it again",
            )
    if manifest.artifact_type == ADAPTER:
        check_adapter(folder, manifest)
    else:
        check_tensors(folder, manifest)
    check_configs(folder, manifest)
    return {
        "artifact_type": manifest.artifact_type,
        "architecture": manifest.architecture,
        "num_tensors": len(manifest.tensors),
        "num_files": len(manifest.files),
        "nbytes": sum(manifest.file_sizes.values()),
        "checks": {"structure": "passed", "integrity": "passed", "tensors": "passed"},
    }


def check_listing(folder: Path, manifest: Manifest) -> None:
    """Check that the folder holds exactly the manifest's files, with their sizes."""
    found = set(walk_files(folder, allow_links=False)) - {MANIFEST_NAME}
    expected = set(manifest.files)
    if found != expected:
        kind = "missing" if expected - found else "extra"
        raise ArtifactError(
            f"file-{kind}",
            f"the folder's files are not those of the manifest: {kind} "
            f"{make_list(expected - found or found - expected)}",
            hint="fetch or publish the folder again",
        )
    for name, size in sorted(manifest.file_sizes.items()):
        if (folder / name).stat().st_size != size:
            raise ArtifactError(
                "file-changed",
                "a file differs from the manifest",
                where=f"`{name}`",
                expected=f"{size} bytes",
                found=f"{(folder / name).stat().st_size} bytes",
                hint="the file was damaged or edited after publishing",
            )


def check_tensors(folder: Path, manifest: Manifest) -> None:
    """Check headers and index of the trained weights against the manifest."""
    prefix = "" if manifest.tensor_directory == "." else f"{manifest.tensor_directory}/"
    inside = [n for n in manifest.files if n.startswith(prefix) and "/" not in n[len(prefix) :]]
    found: dict[str, TensorSpec] = {}
    weight_map: dict[str, str] = {}
    for name in sorted(n for n in inside if n.endswith(".safetensors")):
        for tensor, entry in read_header(folder / name).tensors.items():
            found[tensor] = entry.spec
            weight_map[tensor] = name[len(prefix) :]
    if found != dict(manifest.tensors):
        changed = {name for name in found if found[name] != manifest.tensors.get(name)}
        changed |= set(manifest.tensors) - set(found)
        raise ArtifactError(
            "tensor-mismatch",
            f"the weights are not those of the manifest: {make_list(changed)}",
            where=f"`{manifest.tensor_directory}`",
        )
    indexes = [name for name in inside if name.endswith(".index.json")]
    if len(indexes) != (len(set(weight_map.values())) > 1):
        raise ArtifactError(
            "index-mismatch",
            "the weights need one index when there are several files, and none otherwise",
            found=f"{len(set(weight_map.values()))} weight files, indexes {make_list(indexes)}",
        )
    for name in indexes:
        index = read_json(folder / name)
        total = sum(spec.nbytes for spec in found.values())
        if (
            not isinstance(index, dict)
            or index.get("weight_map") != weight_map
            or index.get("metadata") != {"total_size": total}
        ):
            raise ArtifactError(
                "index-mismatch", "the index does not match the weight files", where=f"`{name}`"
            )


def check_adapter(folder: Path, manifest: Manifest) -> None:
    """Check both weight files of an adapter folder, and that both hold the same configuration."""
    headers = {name: read_header(folder / name) for name in (PEFT_WEIGHTS, DIFFUSERS_WEIGHTS)}
    found = {n: entry.spec for n, entry in headers[PEFT_WEIGHTS].tensors.items()}
    twin = {
        PEFT_PREFIX + n.removeprefix(DIFFUSERS_PREFIX): entry.spec
        for n, entry in headers[DIFFUSERS_WEIGHTS].tensors.items()
    }
    for name, specs in ((PEFT_WEIGHTS, found), (DIFFUSERS_WEIGHTS, twin)):
        if specs != dict(manifest.tensors):
            raise ArtifactError(
                "tensor-mismatch",
                "the adapter's tensors are not those of the manifest",
                where=f"`{name}`",
            )
    config = read_json(folder / CONFIG_NAME)
    text = headers[DIFFUSERS_WEIGHTS].metadata.get(DIFFUSERS_METADATA, "")
    if text != encode_metadata(config):
        raise ArtifactError(
            "class-mismatch",
            f"`{DIFFUSERS_WEIGHTS}` and `{CONFIG_NAME}` state different configurations",
            where=f"`{folder.name}`",
        )


def check_configs(folder: Path, manifest: Manifest) -> None:
    """Check the pipeline's class, and that no edited config tells where the base came from."""
    if "model_index.json" in manifest.files:
        index = read_json(folder / "model_index.json")
        found = index.get("_class_name") if isinstance(index, dict) else None
        if found != manifest.architecture:
            raise ArtifactError(
                "class-mismatch",
                "`model_index.json` names another pipeline than the manifest",
                expected=manifest.architecture,
                found=str(found),
            )
    for name in manifest.files:
        if is_config(name):
            data = read_json(folder / name)
            leaked = [key for key in LOCATION_FIELDS if isinstance(data, dict) and key in data]
            if leaked:
                raise ArtifactError(
                    "location-leaked",
                    f"a config tells where its model came from: {make_list(leaked)}",
                    where=f"`{name}`",
                )
