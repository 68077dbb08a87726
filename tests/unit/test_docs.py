"""Documents that must follow the code: error ids, options, manifest fields, links."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_merge.cli import make_parser
from dist_merge.errors import KINDS
from dist_merge.manifest import FIELDS

ROOT = Path(__file__).resolve().parents[2]
# How the package spells the class of an error it raises; `kind` is a parameter of that type.
CALLS = {*KINDS, "kind"}
# Headings of troubleshooting.md that are kinds of error, not ids, have capitals or spaces.
HEADING = re.compile(r"^### ([a-z0-9-]+)$", re.MULTILINE)


def list_id_patterns() -> set[str]:
    """Regular expressions of every error id in the package's source."""
    found: set[str] = set()
    for path in (ROOT / "dist_merge").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", None)
                if name in CALLS:
                    found |= set(spell(node.args[0]))
    return found


def spell(node: ast.expr) -> Iterator[str]:
    """Patterns of the values an expression for an id can have; other expressions give none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.escape(node.value)
    elif isinstance(node, ast.IfExp):
        yield from spell(node.body)
        yield from spell(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(
            re.escape(str(part.value)) if isinstance(part, ast.Constant) else "[a-z0-9]+"
            for part in node.values
        )


def test_troubleshooting_headings_are_the_error_ids() -> None:
    """Catches an error without an explanation, and an explanation of an error that is gone."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = HEADING.findall(text)
    assert len(headings) == len(set(headings)), "one heading per id"
    patterns = list_id_patterns()
    assert len(patterns) > 80, "the search for ids is broken"
    undocumented = {p for p in patterns if not any(re.fullmatch(p, h) for h in headings)}
    outdated = {h for h in headings if not any(re.fullmatch(p, h) for p in patterns)}
    assert (undocumented, outdated) == (set(), set())


def test_readme_names_every_merge_option() -> None:
    """Catches an option that was added or renamed without a line in the README."""
    commands = next(a for a in make_parser()._actions if a.dest == "operation")
    assert isinstance(commands.choices, dict)
    actions = commands.choices["merge"]._actions
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in text.splitlines() if line.startswith("| `--"))
    shown = set(re.findall(r"--[a-z_-]+", table))
    missing = [a.dest for a in actions if a.dest != "help" and not shown & set(a.option_strings)]
    assert missing == []
    known = {spelling for action in actions for spelling in action.option_strings}
    assert shown <= known, shown - known


def test_manifest_fields_are_documented() -> None:
    """Catches a manifest field that the format document does not describe."""
    text = (ROOT / "docs" / "manifest.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    assert {*FIELDS, "schema_version", "dtype_changes", "left_out"} <= described


@pytest.mark.parametrize(
    "name", ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_to_files(name: str) -> None:
    """Catches a link to a document that was moved or never written."""
    page = ROOT / name
    for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert "://" in link or (page.parent / link).exists(), link
