"""Write what describes the weights (index, adapter config, manifests), then check the folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .adapters.export import read_planned_config
from .adapters.load_check import check_adapter_load
from .adapters.settings import ADAPTER_DIR, CONFIG_NAME
from .files import sha256_file, write_json
from .load_check import check_load
from .manifest import MANIFEST_NAME, make_manifest, producer_versions
from .merge_job import Job, MergedShards
from .package import PackagedFiles, write_index
from .records import AdapterPlan, MergePlan
from .safetensors_header import read_header
from .validate import check_folder


def finish_folder(
    folder: Path,
    *,
    plan: MergePlan,
    job: Job,
    packaged: PackagedFiles,
    merged: MergedShards,
    source_files: Mapping[str, str],
    replaced_files: Mapping[str, str],
) -> tuple[str, int]:
    """Write index, adapter config and manifests into a staged folder, and check it.

    Args:
        folder: The staged folder; weights and copies are in it.
        plan: The plan.
        job: What was inspected.
        packaged: Hashes of the copies.
        merged: Hashes of the weights.
        source_files: SHA256 of the checkpoint's files.
        replaced_files: SHA256 of the base's weights that are not copied.

    Returns:
        Path of the manifest in the folder, and the number of files it lists.

    Ranks: rank 0 only.
    """
    common: dict[str, Any] = {
        "backend": job.sources.inventory.backend,
        "dtype": job.config.dtype,
        "max_shard_size_bytes": int(job.config.max_shard_size),
        "source_files": source_files,
        "base_files": {**packaged.base_files, **replaced_files},
        "source_model_config": {
            "sha256": job.sources.inventory.actor_config_sha256,
            "logical_path": "huggingface/config.json",
        },
        "trained_component": job.config.component,
        "versions": producer_versions(),
        "dtype_changes": dict(plan.dtype_changes),
    }
    files = {path: sha256 for path, (sha256, _) in merged.files.items()}
    if plan.adapter_shards:
        files |= finish_adapter(folder, plan=plan, job=job, files=files, common=common)
        if job.is_adapter_alone:
            check_folder(folder / ADAPTER_DIR, known_sha256=strip(files))
            return f"{ADAPTER_DIR}/{MANIFEST_NAME}", len(files) - 1
    files |= packaged.files
    if plan.index_path is not None:
        write_index(plan, folder)
        files[plan.index_path] = sha256_file(folder / plan.index_path)
    headers = [read_header(folder / shard.path) for shard in plan.weight_shards]
    tensors = {n: entry.spec for header in headers for n, entry in header.tensors.items()}
    assert job.base is not None
    manifest = make_manifest(
        plan=plan,
        files=files,
        file_sizes={path: (folder / path).stat().st_size for path in files},
        config_transform_files=list(packaged.config_transform_files),
        left_out=list(job.base.left_out),
        checks={
            "model_class_check": job.base.model_class_check,
            "runtime": check_load(folder, directory=plan.tensor_directory, tensors=tensors),
        },
        **common,
    )
    if plan.adapter is not None and plan.adapter.is_fused:
        manifest["lora_fusion"] = describe_fusion(plan.adapter, merged.fold_counts)
    write_json(folder / MANIFEST_NAME, manifest)
    check_folder(folder, known_sha256=files)
    return MANIFEST_NAME, len(files)


def strip(files: Mapping[str, str]) -> dict[str, str]:
    """Files of the adapter folder, relative to it."""
    prefix = f"{ADAPTER_DIR}/"
    return {
        path.removeprefix(prefix): sha256
        for path, sha256 in files.items()
        if path.startswith(prefix)
    }


def finish_adapter(
    folder: Path, *, plan: MergePlan, job: Job, files: Mapping[str, str], common: dict[str, Any]
) -> dict[str, str]:
    """Write the adapter folder's config and manifest; returns their SHA256 by path."""
    adapter = plan.adapter
    assert adapter is not None
    directory = folder / ADAPTER_DIR
    write_json(directory / CONFIG_NAME, read_planned_config(plan.adapter_shards))
    own = {**strip(files), CONFIG_NAME: sha256_file(directory / CONFIG_NAME)}
    shards = [
        replace(shard, path=shard.path.removeprefix(f"{ADAPTER_DIR}/"))
        for shard in plan.adapter_shards
    ]
    # The first file has PEFT's keys, which name the tensors in the manifest.
    described = replace(
        plan,
        artifact_type="peft_adapter",
        architecture="peft",
        tensor_directory=".",
        output_shards=(replace(shards[0], is_adapter=False),),
    )
    manifest = make_manifest(
        plan=described,
        files=own,
        file_sizes={path: (directory / path).stat().st_size for path in own},
        config_transform_files=[],
        left_out=[],
        checks={"runtime": check_adapter_load(directory, adapter, **find_trained_class(job))},
        **{**common, "base_files": {}, "dtype_changes": {}, "dtype": "preserve"},
    )
    manifest |= {
        "adapter_name": adapter.name,
        "weight_layout": "peft",
        "adapter_source": adapter.source,
        "adapter_assumed": list(adapter.assumed),
        "excluded_adapters": list(adapter.excluded_adapters),
    }
    write_json(directory / MANIFEST_NAME, manifest)
    names = (CONFIG_NAME, MANIFEST_NAME)
    return {f"{ADAPTER_DIR}/{name}": sha256_file(directory / name) for name in names}


def find_trained_class(job: Job) -> dict[str, Any]:
    """Class and config of the model that the adapter belongs to, as far as they are known."""
    config = job.base.config if job.base is not None else job.sources.inventory.actor_config
    if job.base is not None:
        return {"class_name": job.base.trained_class, "config": config}
    class_name = str((config or {}).get("_class_name")).removeprefix("FSDP")
    return {"class_name": class_name, "config": config or {}}


def describe_fusion(adapter: AdapterPlan, counts: Mapping[str, int]) -> dict[str, Any]:
    """The manifest's `lora_fusion`."""
    scalings = set(adapter.scalings.values())
    common = adapter.lora_alpha / (adapter.r**0.5 if adapter.use_rslora else adapter.r)
    fusion: dict[str, Any] = {
        "adapter_name": adapter.name,
        "r": adapter.r,
        "lora_alpha": adapter.lora_alpha,
        "scaling": common,
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
        "base_weights": adapter.base_weights,
        "fused_modules": sorted(adapter.ranks),
        "saved_modules": list(adapter.saved_modules),
        "excluded_adapters": list(adapter.excluded_adapters),
        "source": adapter.source,
        "assumed": list(adapter.assumed),
        **counts,
    }
    if scalings != {common}:
        fusion["module_scaling"] = dict(adapter.scalings)
    return fusion
