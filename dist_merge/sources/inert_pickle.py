"""A pickle reader that builds nothing but listed stand-ins: plain data, no class of any library."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SourceError
from .unpickle import first_line, unsafe_error


class InertUnpickler(pickle.Unpickler):
    """Resolves globals from a table of `module.name` -> stand-in; anything else is refused."""

    def __init__(self, content: bytes, *, path: Path, allowed: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._path = path
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of one global; never imports."""
        key = f"{module}.{name}"
        if key not in self._allowed:
            raise unsafe_error(self._path, f"`{key}`")
        return self._allowed[key]

    def persistent_load(self, pid: Any) -> Any:
        """Hand on what the pickle stores outside of itself: a description of a storage."""
        return pid


def load_inert(content: bytes, *, path: Path, allowed: Mapping[str, Any]) -> Any:
    """Load a pickle made of plain values and the stand-ins in `allowed`.

    Raises:
        SourceError: It asks for any other global (`unsafe-pickle`), or is damaged.
    """
    try:
        return InertUnpickler(content, path=path, allowed=allowed).load()
    except SourceError:
        raise
    # A hostile or damaged pickle can raise nearly anything from its opcodes.
    except Exception as error:
        raise unreadable(path, first_line(error)) from error


def unreadable(path: Path, found: str) -> SourceError:
    """Make the error for a file that is damaged."""
    return SourceError(
        "unreadable-file",
        "a checkpoint file cannot be read: it is cut short, damaged or not one",
        where=f"`{path.name}`",
        found=found,
        hint="was the save interrupted? use an earlier checkpoint",
    )


def make_record(name: str) -> type:
    """Make a fresh class that only keeps the state a pickle gives it.

    Fresh per load: a pickle that sets attributes on the class cannot reach another load.
    """

    def __init__(self: Any, *arguments: Any) -> None:  # noqa: N807
        self.arguments = arguments
        self.state = {}

    def __setstate__(self: Any, state: Any) -> None:  # noqa: N807
        object.__setattr__(self, "state", state)

    return type(name, (), {"state": {}, "__init__": __init__, "__setstate__": __setstate__})
