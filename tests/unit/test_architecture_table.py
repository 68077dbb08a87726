"""The page about architectures says what the registry and the tests hold."""

from __future__ import annotations

from dist_merge.architectures import ARCHITECTURES
from tests.helpers.architecture_table import END, PAGE, START, WHOLE, make_table
from tests.helpers.architecture_table import tested_transformers as list_tested


def test_table_is_what_the_registry_makes() -> None:
    """Catches a family that was added without its row: run the helper to write it."""
    _, _, rest = PAGE.read_text().partition(START)
    table, _, _ = rest.partition(END)
    assert table == make_table()


def test_every_registered_class_has_an_end_to_end_case() -> None:
    """Catches a family that nobody ever merged."""
    missing = {a.trained_class for a in ARCHITECTURES} - list_tested()
    assert missing == set()


def test_whole_pipelines_of_the_page_are_really_merged() -> None:
    """Catches a claim without a test: the cases are read from the tests' own lists."""
    import inspect

    from tests.helpers import tiny_models, tiny_pipelines

    text = inspect.getsource(tiny_pipelines) + inspect.getsource(tiny_models)
    claimed = {name for names in WHOLE.values() for name in names}
    assert {name for name in claimed if name not in text} == set()
