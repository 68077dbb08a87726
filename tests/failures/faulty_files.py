"""Make the n-th file operation of this process fail, below the functions that the program calls.

Only operations on paths under one folder count, so that imports and caches go on undisturbed. What
`os.fdopen` gives out is wrapped too: a buffered file writes with a system call of its own.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from dist_merge import publish

SHORT = "short write"
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EACCES", "ESTALE")


@dataclass
class Faults:
    """Counts the operations under `root`; the one with number `number` fails with `error`.

    `only` is the end of the paths that count. Without `has_noreplace` the file system knows only
    the plain rename. `log` names every operation counted, `was_renamed` tells whether the target
    had been put in place before the fault.
    """

    root: Path
    operation: str
    number: int
    error: str
    only: str = ""
    has_noreplace: bool = True
    log: list[str] = field(default_factory=list)
    is_struck: bool = False
    is_renamed: bool = False
    was_renamed: bool = False

    def count(self, operation: str, path: object) -> None:
        """Count one operation, and fail where it is due."""
        text = str(path)
        if operation != self.operation or not text.startswith(str(self.root)):
            return
        if not text.endswith(self.only):
            return
        self.log.append(f"{operation} {path}")
        if len(self.log) == self.number:
            self.is_struck, self.was_renamed = True, self.is_renamed
            if self.error != SHORT:
                code = getattr(errno, self.error)
                raise OSError(code, os.strerror(code), str(path))

    def is_short(self) -> bool:
        """Whether the write that was just counted takes only a part."""
        return self.error == SHORT and len(self.log) == self.number and self.operation == "write"


def path_of(descriptor: int) -> str:
    """Path of an open file."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


class FaultyFile(io.FileIO):
    """A raw file whose writes count."""

    faults: Faults

    def write(self, data: Any) -> int:
        """Write, or fail."""
        self.faults.count("write", path_of(self.fileno()))
        view = memoryview(data).cast("B")
        return super().write(view[: max(1, len(view) // 2)] if self.faults.is_short() else view)


@contextmanager
def plant(faults: Faults) -> Iterator[None]:
    """Count the operations of this process while the context lasts."""
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "mkdir", "rename")}

    def fdopen(descriptor: int, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode != "wb":
            return open(descriptor, mode, *args, **kwargs)
        raw = FaultyFile(descriptor, "wb")
        raw.faults = faults
        return io.BufferedWriter(raw)

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:
        faults.count("open", path)
        return int(real["open"](path, *args, **kwargs))

    def write(descriptor: int, data: Any) -> int:
        faults.count("write", path_of(descriptor))
        return int(real["write"](descriptor, data[: len(data) // 2] if faults.is_short() else data))

    def fsync(descriptor: int) -> None:
        faults.count("fsync", path_of(descriptor))
        real["fsync"](descriptor)

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        faults.count("mkdir", path)
        real["mkdir"](path, *args, **kwargs)

    def rename(source: Any, target: Any) -> None:
        faults.count("rename", target)
        real["rename"](source, target)
        faults.is_renamed = True

    rename_noreplace = publish.rename_noreplace

    def renameat2(source: Path, target: Path) -> int:
        if not faults.has_noreplace:
            return errno.EINVAL
        try:
            faults.count("rename", target)
        except OSError as error:
            return int(error.errno or 0)
        code = rename_noreplace(source, target)
        faults.is_renamed = code == 0
        return code

    with ExitStack() as stack:
        for name, fake in (
            ("open", opened),
            ("write", write),
            ("fsync", fsync),
            ("mkdir", mkdir),
            ("rename", rename),
            ("fdopen", fdopen),
        ):
            stack.enter_context(mock.patch.object(os, name, fake))
        stack.enter_context(mock.patch.object(publish, "rename_noreplace", renameat2))
        yield
