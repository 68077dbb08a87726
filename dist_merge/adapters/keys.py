"""Which tensors of a checkpoint belong to LoRA adapters, told from the structure of their names.

PEFT renames a targeted layer `X` to `X.base_layer` and puts `X.lora_A.<adapter>.weight` and its
kin beside it; a module trained as a whole becomes `X.original_module` and
`X.modules_to_save.<adapter>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import PlanError, make_list

# Adapter of tensors saved without a name, as PEFT's own files have them.
UNNAMED = "default"
FACTORS = frozenset({"lora_A", "lora_B", "lora_magnitude_vector"})
EMBEDDINGS = frozenset({"lora_embedding_A", "lora_embedding_B"})
# Name segments of adapter methods that are not plain LoRA or DoRA.
OTHER_METHODS = re.compile(
    r"lora_.+|hada_.+|lokr_.+|ia3_.+|vera_.+|(b)?oft_.+|adapter_.+|randlora_.+"
)


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """One tensor of one adapter: its module, and which part of it, such as `lora_A.weight`."""

    module: str
    part: str
    adapter: str


@dataclass(frozen=True)
class AdapterNames:
    """The checkpoint's names sorted by what they are; everything maps to the checkpoint's FQN.

    `factors`: adapter -> module -> part -> FQN. `saved`: adapter -> plain name -> FQN of the copy
    in `modules_to_save`. `plain`: plain name -> FQN, with `base_layer` taken out.
    `originals`: plain name -> FQN of the untrained copy of a module in `modules_to_save`.
    """

    factors: Mapping[str, Mapping[str, Mapping[str, str]]]
    saved: Mapping[str, Mapping[str, str]]
    plain: Mapping[str, str]
    originals: Mapping[str, str] = field(default_factory=dict)

    @property
    def adapters(self) -> list[str]:
        """Names of all adapters, sorted."""
        return sorted(set(self.factors) | set(self.saved))

    @property
    def is_lora_only(self) -> bool:
        """Whether the checkpoint holds adapters and nothing else."""
        return bool(self.adapters) and not self.plain and not self.originals


def parse_key(fqn: str) -> AdapterKey | None:
    """Parse the name of an adapter's tensor; None for any other tensor."""
    parts = fqn.split(".")
    last = parts[-1]
    if last in ("weight", "bias") and len(parts) > 3 and parts[-3] in FACTORS:
        return AdapterKey(".".join(parts[:-3]), f"{parts[-3]}.{last}", parts[-2])
    if last in ("weight", "bias") and len(parts) > 2 and parts[-2] in FACTORS:
        return AdapterKey(".".join(parts[:-2]), f"{parts[-2]}.{last}", UNNAMED)
    if len(parts) > 2 and parts[-2] in EMBEDDINGS:
        return AdapterKey(".".join(parts[:-2]), parts[-2], last)
    if len(parts) > 1 and last in EMBEDDINGS:
        return AdapterKey(".".join(parts[:-1]), last, UNNAMED)
    if len(parts) > 1 and last == "lora_magnitude_vector":
        return AdapterKey(".".join(parts[:-1]), f"{last}.weight", UNNAMED)
    return None


def sort_names(fqns: Iterable[str]) -> AdapterNames:
    """Sort a checkpoint's tensor names into adapters and plain tensors.

    Raises:
        PlanError: A name belongs to an adapter method that is not supported, or two names fall
            together once `base_layer` is taken out.
    """
    factors: dict[str, dict[str, dict[str, str]]] = {}
    saved: dict[str, dict[str, str]] = {}
    others: list[str] = []
    for fqn in sorted(set(fqns)):
        key = parse_key(fqn)
        if key is not None:
            if key.module.split(".")[-1] == "base_layer":
                raise make_unsupported(fqn, "an adapter on expert parameters (target_parameters)")
            module = factors.setdefault(key.adapter, {}).setdefault(key.module, {})
            if key.part in module:
                raise make_collision(fqn, module[key.part])
            module[key.part] = fqn
        else:
            copy = split_at(fqn, "modules_to_save")
            if copy is not None and "." in copy[1]:
                adapter, _, rest = copy[1].partition(".")
                saved.setdefault(adapter, {})[f"{copy[0]}.{rest}"] = fqn
            else:
                others.append(fqn)
    targeted = {module for modules in factors.values() for module in modules}
    wrapped = {name for names in saved.values() for name in names}
    plain, originals = sort_others(others, targeted=targeted, wrapped=wrapped)
    return AdapterNames(factors, saved, plain, originals)


def sort_others(
    fqns: Iterable[str], *, targeted: set[str], wrapped: set[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Take `base_layer` and `original_module` out of the names of wrapped modules only."""
    plain: dict[str, str] = {}
    originals: dict[str, str] = {}
    for fqn in fqns:
        name, into = fqn, plain
        layer = split_at(fqn, "base_layer")
        original = split_at(fqn, "original_module")
        if layer is not None and layer[0] in targeted:
            if layer[1].split(".")[0] == "base_layer":
                raise make_unsupported(fqn, "an adapter on expert parameters (target_parameters)")
            name = f"{layer[0]}.{layer[1]}"
        elif original is not None and f"{original[0]}.{original[1]}" in wrapped:
            name, into = f"{original[0]}.{original[1]}", originals
        elif any(OTHER_METHODS.fullmatch(part) for part in fqn.split(".")):
            raise make_unsupported(fqn, "an adapter method other than LoRA or DoRA")
        if name in into:
            raise make_collision(fqn, into[name])
        into[name] = fqn
    return plain, originals


def split_at(fqn: str, segment: str) -> tuple[str, str] | None:
    """Split a name at its first whole `segment`; None where there is none inside."""
    parts = fqn.split(".")
    if segment not in parts[1:-1]:
        return None
    position = parts.index(segment, 1)
    return ".".join(parts[:position]), ".".join(parts[position + 1 :])


def check_adapter(names: AdapterNames, adapter: str) -> None:
    """Check that the checkpoint has this adapter.

    Raises:
        PlanError: It has not; the message lists what is there.
    """
    if adapter not in names.adapters:
        raise PlanError(
            "adapter-missing",
            f"the checkpoint has no adapter `{adapter}`",
            expected=f"one of {make_list(names.adapters, limit=20)}" if names.adapters else None,
            found=None if names.adapters else "no adapter at all",
            hint="choose one with --adapter-name"
            if names.adapters
            else "leave --fuse-lora out, or pass the checkpoint of the LoRA run",
        )


def make_unsupported(fqn: str, what: str) -> PlanError:
    """Make the error for an adapter this version cannot merge or export."""
    return PlanError(
        "adapter-unsupported",
        f"tensor `{fqn}` belongs to {what}, which is not supported",
        expected="LoRA or DoRA on linear, convolution or embedding layers",
        hint="merge the adapter in the training code (merge_and_unload) and save again",
    )


def make_collision(fqn: str, other: str) -> PlanError:
    """Make the error for two tensors of one name."""
    return PlanError("key-collision", f"`{other}` and `{fqn}` name the same tensor")
