"""How strong an adapter is: from what was recorded or stated, never guessed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PlanError, SourceError
from ..files import read_json

CONFIG_NAME = "adapter_config.json"
META_NAME = "lora_train_meta.json"
ADAPTER_DIR = "lora_adapter"
# Initialisations that change the base weights: the factors alone are not what was learned.
CHANGED_BASE = re.compile(r"(pissa.*|olora|corda.*|loftq|lora_ga)$")
# Fields of PEFT's LoraConfig that do not change what a saved adapter computes.
NEUTRAL = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
        "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
        "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
        "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "target_modules", "task_type", "velora_config",
    }
)  # fmt: skip
READ = frozenset(
    {
        "alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "lora_bias",
        "modules_to_save", "r", "rank_pattern", "use_dora", "use_rslora",
    }
)  # fmt: skip


@dataclass(frozen=True)
class AdapterSettings:
    """What fixes the strength of one adapter.

    `source` says where it came from, `assumed` what that place does not record.
    """

    r: int
    lora_alpha: float
    source: str
    use_rslora: bool = False
    use_dora: bool | None = None
    fan_in_fan_out: bool = False
    bias: str = "none"
    modules_to_save: tuple[str, ...] = ()
    init_lora_weights: bool | str = True
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """Rank of one module's factors."""
        return int(find_pattern(self.rank_pattern, module, self.r))

    def alpha_of(self, module: str) -> float:
        """Alpha of one module."""
        return find_pattern(self.alpha_pattern, module, self.lora_alpha)

    def scaling_of(self, module: str) -> float:
        """Factor of B @ A: alpha / r, with rsLoRA alpha / sqrt(r)."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def changes_base(self) -> bool:
        """Whether the adapter's initialisation changed the base weights."""
        name = self.init_lora_weights
        return isinstance(name, str) and CHANGED_BASE.match(name.lower()) is not None


def find_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Value of the first pattern that matches a module's path as a suffix, as PEFT matches."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def find_settings(
    local_dir: Path, *, adapter: str, lora_config: Path | None
) -> list[tuple[str, dict[str, Any]]]:
    """Read every place that may state the adapter's strength, the strongest first.

    Args:
        local_dir: Folder of the checkpoint.
        adapter: Name of the adapter; a place recorded for another name is not taken.
        lora_config: `adapter_config.json` the user states, or the folder that holds it.

    Returns:
        (name of the place, its content) of those that exist.

    Raises:
        SourceError: A file is unreadable, or the stated one is missing.
    """
    found = []
    if lora_config is not None:
        path = lora_config / CONFIG_NAME if lora_config.is_dir() else lora_config
        if not path.is_file():
            raise SourceError(
                "adapter-settings-missing",
                "the adapter config passed as --lora-config does not exist",
                where=f"`{path}`",
            )
        found.append(("--lora-config", read_object(path)))
    for place in (
        f"{ADAPTER_DIR}/{adapter}/{CONFIG_NAME}",
        f"{adapter}/{CONFIG_NAME}",
        f"{ADAPTER_DIR}/{CONFIG_NAME}",
        CONFIG_NAME,
        META_NAME,
    ):
        if (local_dir / place).is_file():
            found.append((place, read_object(local_dir / place)))
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    data = read_json(path, kind=SourceError)
    if not isinstance(data, dict):
        raise SourceError("bad-json", "the file is no JSON object", where=f"`{path.name}`")
    return data


def choose_settings(
    places: Sequence[tuple[str, Mapping[str, Any]]], *, adapter: str, adapters: Sequence[str]
) -> AdapterSettings:
    """Take the strongest place, and check the others against it.

    What lies in the checkpoint's own folder was recorded for `default`, or for the only adapter.

    Raises:
        PlanError: Nothing is recorded, places contradict each other, or a value is not usable.
    """
    is_main = adapter == "default" or len(adapters) == 1
    usable = [
        (place, data)
        for place, data in places
        if is_main or place == "--lora-config" or f"{adapter}/" in place
    ]
    parsed = [
        parse_meta(place, data) if place == META_NAME else parse_config(place, data)
        for place, data in usable
    ]
    if not parsed:
        raise PlanError(
            "adapter-settings-missing",
            f"nothing says how strong adapter `{adapter}` is",
            expected=f"r and lora_alpha in {ADAPTER_DIR}/{CONFIG_NAME} or {META_NAME} "
            "in the checkpoint's folder",
            found="what is there was recorded for another adapter" if places else "no such file",
            hint="pass the adapter_config.json of the run (r, lora_alpha, use_rslora, patterns) "
            "as --lora-config",
        )
    chosen = parsed[0]
    for other in parsed[1:]:
        check_same(chosen, other)
    return chosen


def check_same(chosen: AdapterSettings, other: AdapterSettings) -> None:
    """Check that a weaker place does not contradict the chosen one; meta files cut alpha."""
    is_meta = other.source == META_NAME
    alpha = int(chosen.lora_alpha) if is_meta else chosen.lora_alpha
    pairs: list[tuple[str, Any, Any]] = [
        ("r", chosen.r, other.r),
        ("lora_alpha", alpha, other.lora_alpha),
    ]
    if not is_meta:
        names = ("use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "use_dora")
        pairs += [(name, getattr(chosen, name), getattr(other, name)) for name in names]
    for name, one, two in pairs:
        if one != two:
            raise PlanError(
                "adapter-settings-contradict",
                f"two places state another `{name}` for the adapter",
                expected=f"{one} as in {chosen.source}",
                found=f"{two} in {other.source}",
                hint="remove the wrong file, or correct what is passed as --lora-config",
            )


def parse_meta(place: str, data: Mapping[str, Any]) -> AdapterSettings:
    """Parse `lora_train_meta.json`: r, an alpha cut to an integer, nothing else of use."""
    rank, alpha = data.get("r"), data.get("lora_alpha")
    check_numbers(place, rank=rank, alpha=alpha)
    assert isinstance(rank, int)
    assert isinstance(alpha, int | float)
    return AdapterSettings(
        r=rank,
        lora_alpha=alpha,
        source=place,
        assumed=("lora_alpha was a whole number", "no rsLoRA", "no rank or alpha patterns",
                 "an initialisation that leaves the base weights alone"),
    )  # fmt: skip


def parse_config(place: str, data: Mapping[str, Any]) -> AdapterSettings:
    """Parse PEFT's `adapter_config.json`.

    Raises:
        PlanError: Another method than LoRA, an option that changes the result and is not
            supported, or a value of a wrong type.
    """
    if data.get("peft_type", "LORA") != "LORA":
        raise PlanError(
            "adapter-unsupported",
            f"the adapter is of kind `{data['peft_type']}`",
            where=f"`{place}`",
            expected="peft_type LORA",
        )
    active = {name: value for name, value in data.items() if value not in (None, False, [], {})}
    unknown = sorted(set(active) - NEUTRAL - READ)
    if unknown:
        raise PlanError(
            "adapter-unsupported",
            f"the adapter uses `{unknown[0]}`, which is not supported",
            where=f"`{place}`",
            found=json.dumps({name: active[name] for name in unknown}, default=str)[:200],
            hint="merge the adapter in the training code (merge_and_unload) and save again",
        )
    rank, alpha = data.get("r"), data.get("lora_alpha")
    check_numbers(place, rank=rank, alpha=alpha)
    ranks, alphas = data.get("rank_pattern") or {}, data.get("alpha_pattern") or {}
    for value in ranks.values():
        check_numbers(place, rank=value, alpha=1)
    for value in alphas.values():
        check_numbers(place, rank=1, alpha=value)
    return AdapterSettings(
        r=rank,  # type: ignore[arg-type]
        lora_alpha=alpha,  # type: ignore[arg-type]
        source=place,
        use_rslora=bool(data.get("use_rslora")),
        use_dora=bool(data.get("use_dora")),
        fan_in_fan_out=bool(data.get("fan_in_fan_out")),
        bias=str(data.get("bias") or "none"),
        modules_to_save=tuple(data.get("modules_to_save") or ()),
        init_lora_weights=data.get("init_lora_weights", True),
        rank_pattern=dict(ranks),
        alpha_pattern=dict(alphas),
    )


def check_numbers(place: str, *, rank: Any, alpha: Any) -> None:
    """Check that r is a positive integer and alpha a positive number."""
    good_rank = isinstance(rank, int) and not isinstance(rank, bool) and rank > 0
    good_alpha = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    good_alpha = good_alpha and math.isfinite(alpha) and alpha != 0
    if not (good_rank and good_alpha):
        raise PlanError(
            "adapter-settings-invalid",
            "the adapter's strength is not usable",
            where=f"`{place}`",
            expected="r a positive integer, lora_alpha a number other than 0",
            found=f"r {rank!r}, lora_alpha {alpha!r}",
            hint="an alpha between 0 and 1 is cut to 0 in lora_train_meta.json: pass the run's "
            "adapter_config.json as --lora-config",
        )
