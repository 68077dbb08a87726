"""`merge_manifest.json`, schema 1: what was made, from what, by which versions.

The format is described in `docs/manifest.md`. No host paths, no times, nothing that depends on
the number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from .errors import ArtifactError
from .files import is_safe_path, make_fingerprint
from .records import DTYPES, MergePlan, TensorSpec

MANIFEST_NAME = "merge_manifest.json"
SCHEMA_VERSION = 1
ARTIFACT_TYPES = (
    "diffusers_pipeline",
    "diffusers_transformer",
    "minimax_h3_pipeline",
    "peft_adapter",
)
CONFIG_TRANSFORM = "remove-location-fields/1"
LAYERS = ("structure", "source_round_trip", "artifact_round_trip", "integrity")


@dataclass(frozen=True)
class Manifest:
    """The checked parts of a manifest that a recheck needs."""

    artifact_type: str
    architecture: str
    tensor_directory: str
    files: Mapping[str, str]
    file_sizes: Mapping[str, int]
    tensors: Mapping[str, TensorSpec]
    data: Mapping[str, Any]


def producer_versions() -> dict[str, str]:
    """Versions of this package and of those that decide what the output looks like."""
    names = ("dist_merge", "torch", "diffusers", "transformers", "safetensors")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def make_manifest(
    *,
    plan: MergePlan,
    backend: str,
    dtype: str,
    max_shard_size_bytes: int,
    source_files: Mapping[str, str],
    base_files: Mapping[str, str],
    files: Mapping[str, str],
    file_sizes: Mapping[str, int],
    source_model_config: Mapping[str, Any],
    trained_component: str,
    config_transform_files: Sequence[str],
    left_out: Sequence[str],
    checks: Mapping[str, str],
    versions: Mapping[str, str],
    dtype_changes: Mapping[str, tuple[str, str]],
) -> dict[str, Any]:
    """Return the manifest of a finished output."""
    tensors = {
        tensor.name: {"shape": list(tensor.spec.shape), "dtype": tensor.spec.dtype}
        for shard in plan.weight_shards
        for tensor in shard.tensors
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "artifact_type": plan.artifact_type,
        "architecture": plan.architecture,
        "backend": backend,
        "trained_components": [trained_component],
        "tensor_directory": plan.tensor_directory,
        "dtype": dtype,
        "dtype_changes": {name: list(pair) for name, pair in dtype_changes.items()},
        "max_shard_size_bytes": max_shard_size_bytes,
        "source_files": dict(source_files),
        "source_fingerprint": make_fingerprint(source_files),
        "source_model_config": dict(source_model_config),
        "base_files": dict(base_files),
        "base_fingerprint": make_fingerprint(base_files),
        "files": dict(files),
        "file_sizes": dict(file_sizes),
        "tensors": tensors,
        "config_transform": {"id": CONFIG_TRANSFORM, "files": sorted(config_transform_files)},
        "left_out": sorted(left_out),
        "producer": dict(versions),
        "verification": {
            **dict.fromkeys(LAYERS, "passed"),
            **checks,
        },
    }


def parse_manifest(data: Any) -> Manifest:
    """Check a manifest's fields and return the parts a recheck needs.

    Raises:
        ArtifactError: A field is missing, of another type, or names a path outside the folder.
    """
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        raise make_error("schema_version", f"expected {SCHEMA_VERSION}")
    for name, kind in FIELDS.items():
        if not isinstance(data.get(name), kind):
            raise make_error(name, f"expected {kind.__name__}")
    if data["artifact_type"] not in ARTIFACT_TYPES:
        raise make_error("artifact_type", f"expected one of {', '.join(ARTIFACT_TYPES)}")
    directory = data["tensor_directory"]
    if directory != "." and not is_safe_path(directory):
        raise make_error("tensor_directory", "expected a relative path")
    for name in ("source_files", "base_files", "files"):
        for path, sha256 in data[name].items():
            if not is_safe_path(path) or not _is_sha256(sha256):
                raise make_error(name, f"{path!r} is no relative path with a SHA256")
    for name in ("source", "base"):
        if data[f"{name}_fingerprint"] != make_fingerprint(data[f"{name}_files"]):
            raise make_error(f"{name}_fingerprint", "does not match the list of files")
    sizes = data["file_sizes"]
    if set(sizes) != set(data["files"]) or not all(_is_count(v) for v in sizes.values()):
        raise make_error("file_sizes", "expected one size per file")
    if MANIFEST_NAME in data["files"]:
        raise make_error("files", "lists the manifest itself")
    for layer in LAYERS:
        if data["verification"].get(layer) != "passed":
            raise make_error("verification", f"`{layer}` is not `passed`")
    return Manifest(
        artifact_type=data["artifact_type"],
        architecture=data["architecture"],
        tensor_directory=directory,
        files=data["files"],
        file_sizes=sizes,
        tensors={name: _parse_spec(name, spec) for name, spec in data["tensors"].items()},
        data=data,
    )


FIELDS: Mapping[str, type] = {
    "artifact_type": str,
    "architecture": str,
    "backend": str,
    "trained_components": list,
    "tensor_directory": str,
    "dtype": str,
    "max_shard_size_bytes": int,
    "source_files": dict,
    "source_fingerprint": str,
    "source_model_config": dict,
    "base_files": dict,
    "base_fingerprint": str,
    "files": dict,
    "file_sizes": dict,
    "tensors": dict,
    "config_transform": dict,
    "producer": dict,
    "verification": dict,
}


def make_error(field: str, found: str) -> ArtifactError:
    """Make the error for one field."""
    return ArtifactError(
        "manifest-invalid",
        f"the manifest's field `{field}` is wrong",
        where=f"`{MANIFEST_NAME}`",
        found=found,
        hint="the folder was changed after publishing; publish it again",
    )


def _parse_spec(name: str, spec: Any) -> TensorSpec:
    good = (
        isinstance(spec, dict)
        and isinstance(spec.get("shape"), list)
        and all(_is_count(size) for size in spec["shape"])
        and isinstance(spec.get("dtype"), str)
        and spec["dtype"] in DTYPES
    )
    if not good:
        raise make_error("tensors", f"{name!r} has no valid shape and dtype")
    return TensorSpec(tuple(spec["shape"]), spec["dtype"])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
