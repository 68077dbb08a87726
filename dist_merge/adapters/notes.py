"""What the log and the result say of an adapter."""

from __future__ import annotations

from ..records import AdapterPlan


def describe_adapter(adapter: AdapterPlan | None) -> list[str]:
    """Sentences about what became of the adapter, the most important first."""
    if adapter is None:
        return []
    strength = f"r {adapter.r}, alpha {adapter.lora_alpha:g}, from {adapter.source}"
    notes = []
    if adapter.is_fused:
        weights = "the checkpoint" if adapter.base_weights == "checkpoint" else "the base model"
        notes.append(
            f"LoRA adapter `{adapter.name}` is folded into {len(adapter.folded)} tensors of "
            f"{weights} ({strength})"
        )
    elif adapter.base_weights == "base_model":
        notes.append(
            f"only LoRA adapter `{adapter.name}` is published ({strength}): the checkpoint holds "
            "no other weights. To fold it into the base model, pass --fuse-lora"
        )
    else:
        notes.append(
            f"LoRA adapter `{adapter.name}` is NOT folded into the published weights ({strength}): "
            "load lora_adapter/ with them, or merge again with --fuse-lora"
        )
        if adapter.changes_base:
            notes.append(
                "the adapter's initialisation changed the base weights: lora_adapter/ belongs to "
                "the weights published beside it and to no others"
            )
    if adapter.assumed:
        notes.append(f"{adapter.source} does not record everything; assumed: "
                     f"{'; '.join(adapter.assumed)}")  # fmt: skip
    if adapter.saved_modules and adapter.is_fused:
        notes.append(f"modules trained as a whole: {', '.join(adapter.saved_modules)}")
    if adapter.excluded_adapters:
        notes.append(f"adapters left out: {', '.join(adapter.excluded_adapters)}")
    return notes
