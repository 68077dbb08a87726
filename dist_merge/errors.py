"""All exceptions of the package: one base class, few kinds, each with a stable id.

The id is a heading in `docs/troubleshooting.md`. A message says what is wrong, where (file, tensor,
rank), what was expected and found, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class MergeError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        error_id: Stable identifier, a heading in `docs/troubleshooting.md`.
        what: What is wrong, one sentence, without a full stop.
        where: File, tensor or step the error is about.
        expected: What should have been there.
        found: What is there.
        hint: What the user can do.
        rank: Process-group rank that met the error; None before ranks are known.
    """

    exit_code = 1

    def __init__(
        self,
        error_id: str,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        hint: str | None = None,
        rank: int | None = None,
    ) -> None:
        self.error_id = error_id
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.hint = hint
        self.rank = rank
        super().__init__(error_id, what)

    def __str__(self) -> str:
        lines = [f"error[{self.error_id}]: {self.what}"]
        places = [f"rank {self.rank}"] if self.rank is not None else []
        if self.where:
            places.append(self.where)
        if places:
            lines.append(f"  where: {', '.join(places)}")
        facts = [
            f"{label}: {value}"
            for label, value in (("expected", self.expected), ("found", self.found))
            if value is not None
        ]
        if facts:
            lines.append("  " + "; ".join(facts))
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the parts as JSON-ready data, to travel between ranks."""
        return {
            "kind": type(self).__name__,
            "error_id": self.error_id,
            "what": self.what,
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "hint": self.hint,
            "rank": self.rank,
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> MergeError:
        """Rebuild an error another rank reported."""
        parts = dict(data)
        kind = KINDS.get(parts.pop("kind"), MergeError)
        return kind(parts.pop("error_id"), parts.pop("what"), **parts)


class RequestError(MergeError, ValueError):
    """An option is missing, unknown, or contradicts another (exit code 2)."""

    exit_code = 2


class SourceError(MergeError):
    """The sharded checkpoint cannot be used."""


class BaseModelError(MergeError):
    """The base model cannot be used, or does not fit the checkpoint."""


class PlanError(MergeError):
    """Checkpoint and base do not match one to one."""


class VerificationError(MergeError):
    """A value in the output differs from its source."""


class ArtifactError(MergeError):
    """A published folder does not agree with its manifest."""


class TargetError(MergeError):
    """The target cannot be written or published."""


class UploadError(MergeError):
    """The artifact could not be uploaded; the local folder is complete and was not changed."""


class PeerError(MergeError):
    """Another rank died, stopped answering, or the job was told to stop."""


class InternalError(MergeError):
    """An exception nobody planned for; the message carries its type and text."""


KINDS: dict[str, type[MergeError]] = {
    kind.__name__: kind
    for kind in (
        MergeError,
        RequestError,
        SourceError,
        BaseModelError,
        PlanError,
        VerificationError,
        ArtifactError,
        TargetError,
        UploadError,
        PeerError,
        InternalError,
    )
}


def make_list(names: Iterable[object], limit: int = 8) -> str:
    """Join sorted names for a message: at most `limit`, then "and N more"."""
    items = sorted({str(name) for name in names})
    shown = ", ".join(f"`{item}`" for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def as_merge_error(error: BaseException, *, step: str) -> MergeError:
    """Return `error` itself when it is ours, else wrap it with its type, text and step."""
    if isinstance(error, MergeError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        name = str(error.filename) if error.filename is not None else step
        return TargetError(
            "io-error",
            f"the operating system refused a file operation during {step}: {error.strerror}",
            where=name,
            hint="check the disk, its free space and the permissions, then run again",
        )
    text = str(error).strip().splitlines()
    return InternalError(
        "internal-error",
        f"{type(error).__name__} during {step}: {text[0] if text else 'no message'}",
        hint="this is a defect of dist_merge or of a library below it; please report it",
    )
