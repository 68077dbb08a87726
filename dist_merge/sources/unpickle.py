"""Open a rank file with torch's restricted unpickler: data only, mapped, on the CPU."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from ..errors import SourceError
from .sharded_tensor import list_stand_ins

# Modules of older torch releases whose classes live elsewhere now (files written by torch 2.4).
OLD_PREFIX = "torch.distributed._tensor."
# Device names that torch knows only where the vendor's plugin is installed.
PLUGIN_DEVICES = ("npu",)


@dataclass(frozen=True)
class RankFile:
    """A loaded state dict; `is_old` tells that its torch had no placement for strided shards."""

    state: Mapping[str, Any]
    is_old: bool = False


def load_rank_file(path: Path) -> RankFile:
    """Load a flat state dict; no code from the file is run, no payload is copied.

    Raises:
        SourceError: The file is damaged, wants a class that is not allowed, or holds no state
            dict.
    """
    import torch.distributed.tensor  # registers the DTensor classes as safe

    try:
        wanted = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        allowed = [*resolve_old_names(wanted), *list_stand_ins(wanted)]
        refused = sorted(set(wanted) - {name for _, name in allowed})
        if refused:
            raise unsafe_error(path, ", ".join(f"`{name}`" for name in refused[:8]))
        with torch.serialization.safe_globals(allowed), QuietMeshLog():
            data = load_on_cpu(path)
    except pickle.UnpicklingError as error:
        raise unsafe_error(path, first_line(error)) from error
    except SourceError:
        raise
    # A hostile or damaged pickle can raise nearly anything from its opcodes.
    except Exception as error:
        raise SourceError(
            "unreadable-file",
            "a checkpoint file cannot be read: it is cut short, damaged or not one",
            where=f"`{path.name}`",
            found=first_line(error),
            hint="was the save interrupted? use an earlier checkpoint",
        ) from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise SourceError(
            "not-a-state-dict",
            "a checkpoint file holds no flat state dict",
            where=f"`{path.name}`",
            found=type(data).__name__,
            hint="expected a map of tensor names to tensors, as `model.state_dict()` gives",
        )
    return RankFile(data, is_old=any(name.startswith(OLD_PREFIX) for name in wanted))


def load_on_cpu(path: Path) -> Any:
    """Load with storages of any device mapped to host memory.

    A device that only a plugin provides is unknown to torch even as a name, so the name is given
    to torch's slot for such devices first, once per process. Where the plugin is there, or the slot
    has another name, nothing is renamed.
    """
    try:
        return torch.load(str(path), weights_only=True, mmap=True, map_location="cpu")
    except RuntimeError as error:
        names = [name for name in PLUGIN_DEVICES if f"device string: {name}" in str(error)]
        if not names or torch._C._get_privateuse1_backend_name() != "privateuseone":
            raise
        rename_privateuse1_backend(names[0])
        return torch.load(str(path), weights_only=True, mmap=True, map_location="cpu")


def resolve_old_names(wanted: list[str]) -> list[Any]:
    """Map old dotted names to today's classes of the same name; only placements and DTensor."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor import _dtensor_spec as spec
    from torch.distributed.tensor import placement_types as placements

    today: dict[str, Any] = {
        "DTensor": DTensor,
        "DTensorSpec": spec.DTensorSpec,
        "TensorMeta": spec.TensorMeta,
        "Shard": Shard,
        "Replicate": Replicate,
        "Partial": Partial,
        "_Partial": Partial,
    }
    strided = getattr(placements, "_StridedShard", None)
    if strided:
        today["_StridedShard"] = strided
    allowed: list[Any] = []
    for name in wanted:
        module, _, attribute = name.rpartition(".")
        if f"{module}.".startswith(OLD_PREFIX) and attribute in today:
            allowed.append((today[attribute], name))
        elif attribute == "_StridedShard" and module == placements.__name__ and strided:
            allowed.append((strided, name))
    return allowed


def flat_parameter_error(found: str, *, file: str) -> SourceError:
    """Make the error for parameters that FSDP1 had flattened into one."""
    return SourceError(
        "flat-parameter",
        "a rank file holds FSDP1's flattened parameters, which do not tell what is in them",
        where=f"`{file}`",
        found=f"`{found}`",
        hint="save inside `FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)`, "
        "not LOCAL_STATE_DICT",
    )


def unsafe_error(path: Path, found: str) -> SourceError:
    """Make the error for a pickle that wants more than tensors."""
    return SourceError(
        "unsafe-pickle",
        "a checkpoint file wants to run or build something that is no tensor; it was not opened",
        where=f"`{path.name}`",
        found=found,
        hint="do not use this file unless you know why it holds that; save tensors only",
    )


def first_line(error: BaseException) -> str:
    """First line of an exception's text, shortened."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


class QuietMeshLog(logging.Filter):
    """Silences torch's remark that a mesh was unpickled without process groups: it is expected."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop the one remark, keep everything else."""
        return "unpickling of the DeviceMesh" not in record.getMessage()

    def __enter__(self) -> QuietMeshLog:
        logging.getLogger("torch.distributed.device_mesh").addFilter(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("torch.distributed.device_mesh").removeFilter(self)
