"""`ModelMergerConfig`: every option of a run, checked once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import RequestError

OUTPUT_FORMATS = ("pipeline", "transformer")
DTYPE_CHOICES = ("preserve", "base", "float32", "float16", "bfloat16")
COMPONENTS = ("transformer", "transformer_2")
COMM_BACKENDS = ("auto", "gloo", "nccl")
SHARD_ORDERS = ("left-to-right", "right-to-left")
BACKENDS = ("auto", "fsdp", "dcp", "hf")
# A model in memory: `publish_model`, not an option of the command line.
LIVE = "live"
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(text: str | int, *, option: str) -> int:
    """Parse a size such as `2GiB`, `5GB` or a number of bytes.

    Raises:
        RequestError: `text` is no size, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).lower()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size <= 0:
        raise RequestError(
            "bad-option",
            f"`{option}` is not a size: {text!r}",
            hint="give bytes, or a number with a unit, for example 2GiB or 5GB",
        )
    return size


def check_repo_name(text: str) -> None:
    """Check the name of a hub repository, `ORG/REPO`.

    Raises:
        RequestError: It is none.
    """
    from huggingface_hub import utils
    from huggingface_hub.errors import HFValidationError

    library: Any = utils  # typed as if it did not export this
    found = repr(text)
    try:
        organisation, _, name = text.partition("/")
        is_good = bool(organisation and name)
        for part in (organisation, name, text) if is_good else ():
            library.validate_repo_id(part)
    except HFValidationError as error:
        is_good, found = False, str(error)
    if not is_good:
        raise RequestError(
            "bad-repo-name",
            "`hf_upload_path` is no name of a hub repository",
            expected="ORG/REPO, for example my-team/my-model",
            found=found,
        )


@dataclass(frozen=True, kw_only=True)
class ModelMergerConfig:
    """Options of one merge; names are those of the command line with underscores.

    Sizes are in bytes (or text such as "2GiB"), `timeout` in seconds.

    Raises:
        RequestError: An option has a value that is not allowed, or one that is needed is missing.
    """

    operation: str = "merge"
    backend: str = "auto"
    local_dir: str | Path | None = None
    target_dir: str | Path | None = None
    base_model: str | Path | None = None
    hf_model_config_path: str | Path | None = None
    state_key: str | None = None
    output_format: str = "pipeline"
    component: str = "transformer"
    dtype: str = "preserve"
    max_shard_size: int | str = 2 * 2**30
    adapter_name: str = "default"
    fuse_lora: bool = False
    lora_config: str | Path | None = None
    allow_suspicious_zeros: bool = False
    check_crc: bool = False
    assume_shard_order: str | None = None
    trust_checkpoint: bool = False
    trust_remote_code: bool = False
    compare_base: bool = True
    comm_backend: str = "auto"
    buffer_size: int | str = 256 * 2**20
    timeout: float = 1800.0
    quiet: bool = False
    hf_upload_path: str | None = None
    private: bool = False

    def __post_init__(self) -> None:
        for name, choices in (
            ("operation", ("merge", "inspect")),
            ("backend", (*BACKENDS, LIVE)),
            ("output_format", OUTPUT_FORMATS),
            ("component", COMPONENTS),
            ("dtype", DTYPE_CHOICES),
            ("comm_backend", COMM_BACKENDS),
            ("assume_shard_order", (None, *SHARD_ORDERS)),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise RequestError(
                    "bad-option", f"`{name}` is {value!r}", expected=", ".join(map(str, choices))
                )
        for name in (
            "local_dir",
            "target_dir",
            "base_model",
            "hf_model_config_path",
            "lora_config",
        ):
            value = getattr(self, name)
            if value is not None:
                if not str(value) or "\0" in str(value):
                    raise RequestError("bad-option", f"`{name}` is {value!r}", expected="a path")
                object.__setattr__(self, name, Path(value))
        if self.state_key is not None and not self.state_key:
            raise RequestError("bad-option", "`state_key` is empty", expected="a state dict's name")
        for name in ("max_shard_size", "buffer_size"):
            object.__setattr__(self, name, parse_size(getattr(self, name), option=name))
        if not 0 < float(self.timeout) < 10**9:
            raise RequestError("bad-option", f"`timeout` is {self.timeout!r}", expected="seconds")
        if not self.adapter_name or "." in self.adapter_name:
            raise RequestError(
                "bad-option",
                f"`adapter_name` is {self.adapter_name!r}",
                expected="a name without dots",
            )
        if self.hf_upload_path is not None:
            check_repo_name(self.hf_upload_path)
        elif self.private:
            raise RequestError(
                "bad-option", "`private` is for uploads", hint="pass --hf_upload_path ORG/REPO too"
            )
        if self.backend != LIVE:
            self.require("local_dir")
        if self.operation == "merge":
            self.require("target_dir")

    def require(self, name: str) -> None:
        """Raise RequestError when an option that this run needs is missing."""
        if getattr(self, name) is None:
            raise RequestError(
                "missing-option", f"`{name}` is needed for a merge", hint=f"pass --{name}"
            )
