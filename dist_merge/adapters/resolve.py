"""Make one adapter of a checkpoint part of the plan: folded into the weights, or exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import PlanError, make_list
from ..operations import Apply, Expression, Operation, Read, make_spec
from ..records import AdapterPlan, ExportedTensor, TensorSpec
from .fold import AddScaled, FoldConv, FoldLinear, FoldTransposed
from .keys import AdapterNames, check_adapter, split_at
from .settings import AdapterSettings

LINEAR = {"lora_A.weight", "lora_B.weight"}
EMBEDDING = {"lora_embedding_A", "lora_embedding_B"}
EXTRAS = {"lora_B.bias", "lora_magnitude_vector.weight"}


@dataclass(frozen=True)
class ResolvedAdapter:
    """What the plan needs: the model's tensors by plain name, and the adapter.

    `expressions` maps every plain name to what makes it; a full checkpoint's adapter is folded
    into them when `plan.is_fused`.
    """

    expressions: Mapping[str, Expression]
    plan: AdapterPlan | None


def resolve_adapter(
    names: AdapterNames,
    *,
    specs: Mapping[str, TensorSpec],
    settings: AdapterSettings | None,
    adapter: str,
    is_fused: bool,
    base_tensors: Mapping[str, TensorSpec] | None = None,
) -> ResolvedAdapter:
    """Sort the checkpoint's tensors into the model's and the adapter's.

    Args:
        names: The checkpoint's names, sorted.
        specs: Shape and dtype by FQN; with the base's weights where these are to be folded into.
        settings: Strength of the adapter; None where the checkpoint has no adapter.
        adapter: Which adapter.
        is_fused: Whether to fold it.
        base_tensors: The base's schema, which an adapter alone is checked against if known.

    Raises:
        PlanError: The adapter is incomplete, does not fit, or cannot be right.
    """
    plain: dict[str, Expression] = {name: Read(fqn) for name, fqn in names.plain.items()}
    if settings is None:
        return ResolvedAdapter(plain, None)
    check_adapter(names, adapter)
    check_complete(names, adapter=adapter, settings=settings)
    modules = names.factors.get(adapter, {})
    saved = names.saved.get(adapter, {})
    if is_fused and names.is_lora_only:
        plain = {name: Read(name) for name in specs if name in (base_tensors or {})}
    known = {name: make_spec(expression, specs) for name, expression in plain.items()}
    known = known or dict(base_tensors or {})
    folded: dict[str, Expression] = {}
    for module, parts in sorted(modules.items()):
        check_factors(module, parts, specs=specs, settings=settings)
        if known:
            # Also an adapter that is only exported must fit the weights it will be used with.
            folded |= fold_module(
                module,
                parts,
                own=plain or {name: Read(name) for name in known},
                specs={**specs, **known},
                settings=settings,
            )
    model = {**plain, **{name: Read(fqn) for name, fqn in names.originals.items()}}
    if is_fused:
        model |= folded
        model |= {name: Read(fqn) for name, fqn in saved.items()}
    plan = AdapterPlan(
        name=adapter,
        r=settings.r,
        lora_alpha=settings.lora_alpha,
        use_rslora=settings.use_rslora,
        use_dora=any("lora_magnitude_vector.weight" in parts for parts in modules.values()),
        lora_bias=any("lora_B.bias" in parts for parts in modules.values()),
        bias=settings.bias,
        fan_in_fan_out=settings.fan_in_fan_out,
        source=settings.source,
        assumed=settings.assumed + dropped_tensors(names, settings),
        ranks={module: settings.rank_of(module) for module in sorted(modules)},
        alphas={module: settings.alpha_of(module) for module in sorted(modules)},
        scalings={module: settings.scaling_of(module) for module in sorted(modules)},
        saved_modules=tuple(sorted({module_of(fqn) for fqn in saved.values()})),
        excluded_adapters=tuple(name for name in names.adapters if name != adapter),
        is_fused=is_fused,
        base_weights="base_model" if names.is_lora_only else "checkpoint",
        folded=tuple(sorted(folded)) if is_fused else (),
        exports=() if is_fused else list_exports(names, adapter=adapter, settings=settings),
        factors=tuple(sorted(fqn for parts in modules.values() for fqn in parts.values())),
        changes_base=settings.changes_base,
    )
    return ResolvedAdapter(model, plan)


def dropped_tensors(names: AdapterNames, settings: AdapterSettings) -> tuple[str, ...]:
    """What a save of LoRA tensors only may have dropped without a trace."""
    if names.is_lora_only and settings.assumed:
        return ("no biases or other modules were trained beside the factors",)
    return ()


def module_of(fqn: str) -> str:
    """Module of a tensor in `modules_to_save`."""
    found = split_at(fqn, "modules_to_save")
    assert found is not None
    return found[0]


def check_complete(names: AdapterNames, *, adapter: str, settings: AdapterSettings) -> None:
    """Check that all tensors which the adapter's config speaks of are there.

    Raises:
        PlanError: Tensors are missing, or are there against the config.
    """
    if names.is_lora_only and settings.changes_base:
        raise PlanError(
            "adapter-changes-base",
            f"adapter `{adapter}` was initialised with `{settings.init_lora_weights}`, which "
            "changed the base weights; the factors alone are not what was trained",
            where=settings.source,
            expected="a checkpoint with the base weights of the run",
            found="adapter tensors only",
            hint="save the full model (no save_lora_only), then merge with --fuse-lora",
        )
    missing = []
    if names.is_lora_only and settings.bias != "none":
        missing.append(f"the trained biases (bias={settings.bias!r})")
    if settings.modules_to_save and not names.saved.get(adapter):
        missing.append(f"the trained modules {make_list(settings.modules_to_save)}")
    modules = names.factors.get(adapter, {})
    has_dora = any("lora_magnitude_vector.weight" in parts for parts in modules.values())
    if settings.use_dora and not has_dora:
        missing.append("DoRA's magnitudes")
    if missing:
        raise PlanError(
            "adapter-incomplete",
            f"the checkpoint lacks tensors of adapter `{adapter}`: {'; '.join(missing)}",
            where=settings.source,
            hint="saving only what is called lora_ drops them: save the full model",
        )
    if has_dora and settings.use_dora is False:
        raise PlanError(
            "adapter-settings-contradict",
            f"adapter `{adapter}` has DoRA magnitudes, but its config says it is no DoRA",
            where=settings.source,
        )


def check_factors(
    module: str,
    parts: Mapping[str, str],
    *,
    specs: Mapping[str, TensorSpec],
    settings: AdapterSettings,
) -> None:
    """Check one module's factors by themselves: a pair, of the stated rank.

    Raises:
        PlanError: They are not.
    """
    kind = EMBEDDING if EMBEDDING & set(parts) else LINEAR
    unknown = set(parts) - kind - EXTRAS
    missing = kind - set(parts)
    if missing or unknown:
        raise PlanError(
            "adapter-incomplete" if missing else "adapter-unsupported",
            f"the adapter's tensors of module `{module}` are not a pair of factors",
            expected=make_list(kind),
            found=make_list(parts),
            hint="save the whole adapter" if missing else None,
        )
    a, b = (specs[parts[part]].shape for part in sorted(kind))
    good = len(a) == len(b) >= 2 and 0 not in (*a, *b) and a[0] == b[1]
    if not good:
        raise PlanError(
            "adapter-shape",
            f"the adapter's factors of module `{module}` do not belong together",
            expected="A [r, in, ...] and B [out, r, ...], not empty",
            found=f"A {list(a)}, B {list(b)}",
            hint="was the adapter saved from one rank's slice?",
        )
    if a[0] != settings.rank_of(module):
        raise PlanError(
            "adapter-settings-contradict",
            f"the adapter's factors of module `{module}` have another rank than recorded",
            expected=f"r {settings.rank_of(module)} from {settings.source}",
            found=f"r {a[0]}",
            hint="pass the run's adapter_config.json, with rank_pattern and alpha_pattern, as "
            "--lora-config",
        )


def fold_module(
    module: str,
    parts: Mapping[str, str],
    *,
    own: Mapping[str, Expression],
    specs: Mapping[str, TensorSpec],
    settings: AdapterSettings,
) -> dict[str, Expression]:
    """Fold one module's adapter into its weight, and with `lora_bias` into its bias.

    Raises:
        PlanError: The factors do not fit the weight, or the module has none.
    """
    scaling = settings.scaling_of(module)
    names = [f"{module}.weight"] + ([f"{module}.bias"] if "lora_B.bias" in parts else [])
    for name in names:
        if name not in own:
            raise PlanError(
                "adapter-incomplete",
                f"the adapter targets `{module}`, but there is no tensor `{name}`",
                hint="is this the base the run started from?",
            )
    kind = EMBEDDING if EMBEDDING & set(parts) else LINEAR
    a, b = (Read(parts[part]) for part in sorted(kind))
    weight = own[names[0]]
    spec = make_spec(weight, specs)
    operation: Operation
    if kind is EMBEDDING or settings.fan_in_fan_out:
        operation = FoldTransposed(scaling)
    elif len(spec.shape) == 2:
        operation = FoldLinear(scaling)
    else:
        operation = FoldConv(scaling)
    operands = [weight, a, b]
    if "lora_magnitude_vector.weight" in parts:
        if kind is EMBEDDING or settings.fan_in_fan_out:
            raise PlanError("adapter-unsupported", f"DoRA on `{module}` is not supported")
        operands.append(Read(parts["lora_magnitude_vector.weight"]))
    folded: dict[str, Expression] = {names[0]: Apply(operation, tuple(operands))}
    if "lora_B.bias" in parts:
        pair = (own[names[1]], Read(parts["lora_B.bias"]))
        folded[names[1]] = Apply(AddScaled(scaling), pair)
    for name, expression in folded.items():
        try:
            make_spec(expression, specs)
        except PlanError as error:
            error.where = error.where or f"tensor `{name}`"
            raise
    return folded


def list_exports(
    names: AdapterNames, *, adapter: str, settings: AdapterSettings
) -> tuple[ExportedTensor, ...]:
    """List the tensors of the adapter folder with the keys PEFT and Diffusers give them."""
    exports: dict[str, str] = {}
    modules = names.factors.get(adapter, {})
    for module, parts in modules.items():
        for part, fqn in parts.items():
            # PEFT saves magnitudes without `.weight`.
            suffix = "lora_magnitude_vector" if part.startswith("lora_magnitude") else part
            exports[f"{module}.{suffix}"] = fqn
    exports.update(names.saved.get(adapter, {}))
    for name, fqn in names.plain.items():
        module, _, last = name.rpartition(".")
        if last == "bias" and (
            settings.bias == "all" or (settings.bias == "lora_only" and module in modules)
        ):
            exports[f"{module}.base_layer.bias" if module in modules else name] = fqn
    return tuple(ExportedTensor(key, exports[key]) for key in sorted(exports))
