"""Would the published weights load? Build their class from the output's own config and compare.

Diffusers fills tensors that a file lacks with random numbers and says so in a log line only, so
the names and shapes are compared strictly here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .architectures import find_trained
from .errors import ArtifactError, make_list
from .files import read_json
from .model_class import read_class_facts
from .records import TensorSpec

PASSED = "passed"
NOT_RUN = "not_run"


def check_load(folder: Path, *, directory: str, tensors: Mapping[str, TensorSpec]) -> str:
    """Build the class on the meta device from the config in `folder`/`directory`.

    Args:
        folder: Published or staged folder.
        directory: Folder of the trained weights in it; `.` for `folder` itself.
        tensors: What the headers of the weight files there say.

    Returns:
        `passed`, or `not_run` where the class is not installed, not registered, or the package is
        a native one that Diffusers does not load.

    Raises:
        ArtifactError: The class makes other tensors than the files hold.
    """
    config = read_json(folder / directory / "config.json")
    name = config.get("_class_name") if isinstance(config, dict) else None
    architecture = find_trained(str(name))
    if architecture is None:
        return NOT_RUN
    facts = read_class_facts(architecture, config)
    if facts is None:
        return NOT_RUN
    found = {name: spec.shape for name, spec in tensors.items()}
    wrong = [n for n in facts.shapes.keys() | found if facts.shapes.get(n) != found.get(n)]
    if wrong:
        raise ArtifactError(
            "load-mismatch",
            f"class `{name}`, built from the published config, has "
            f"other tensors than the published weights: {make_list(wrong)}",
            where=f"`{directory}`",
            expected=f"{len(facts.shapes)} tensors",
            found=f"{len(found)} tensors",
            hint="do not use this folder; weights and config do not belong together",
        )
    return PASSED
