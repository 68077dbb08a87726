"""Which state dict of a checkpoint is the model: the user chooses where it is unclear."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import SourceError

# The name of tensors that lie at the top of the checkpoint, in no state dict of their own.
TOP = "."
OPTIMIZER_NAMES = frozenset(
    {"optim", "optims", "optimizer", "optimizers", "optim_state", "optimizer_state"}
    | {"optim_state_dict", "optimizer_state_dict"}
)
# Keys every torch optimizer's state dict has.
OPTIMIZER_PARTS = frozenset({"state", "param_groups"})


def is_optimizer(state: str) -> bool:
    """Tell whether a state dict's dotted name is an optimizer's, or lies in one."""
    first, *rest = state.split(".")
    return first in OPTIMIZER_NAMES | OPTIMIZER_PARTS or bool(OPTIMIZER_PARTS & set(rest))


def choose_state(counts: Mapping[str, int], *, state_key: str | None) -> str:
    """Return the state dict to merge; `counts` are numbers of tensors by name.

    Raises:
        SourceError: There is no such state dict, none that can be a model, or more than one.
    """
    models = {name: count for name, count in counts.items() if not is_optimizer(name)}
    there = ", ".join(f"`{name}` ({models[name]} tensors)" for name in sorted(models))
    if not models:
        raise SourceError(
            "no-model-state",
            "the checkpoint holds no model tensors",
            found="only an optimizer's state" if counts else "no tensors at all",
            hint="pass the folder the model was saved to; for accelerate `pytorch_model_fsdp_0`",
        )
    if state_key is not None:
        if state_key not in models:
            raise SourceError(
                "state-key-unknown",
                f"the checkpoint has no state dict `{state_key}` that can be a model",
                found=there,
                hint="pass one of these as --state-key; `.` is the top of the checkpoint",
            )
        return state_key
    if len(models) > 1:
        raise SourceError(
            "state-key-needed",
            "the checkpoint holds several state dicts that can be the model",
            found=there,
            hint="pass the one to merge as --state-key, for example --state-key model; "
            "`.` is the top of the checkpoint",
        )
    return next(iter(models))
