"""The pages show what the studies of trained networks recorded."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "studies" / "trained"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trained_tables", FOLDER / "tables.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_show_the_recorded_results(tables: ModuleType) -> None:
    for page, heading, table in tables.tables():
        text = page.read_text(encoding="utf-8")
        assert tables.with_table(text, heading, table) == text, f"{page}, {heading}: run studies/trained/tables.py"


def test_only_the_first_table_below_a_heading_is_replaced(tables: ModuleType) -> None:
    page = "| a |\n|---|\n\n## One\ntext\n\n| a |\n|---|\n| 1 |\n\n| b |\n|---|\n"
    assert tables.with_table(page, "## One", "| new |\n") == "| a |\n|---|\n\n## One\ntext\n\n| new |\n\n| b |\n|---|\n"


def test_gains_are_over_the_baseline_of_the_same_seed(tables: ModuleType) -> None:
    runs = {"0": {"miou": 30.0}, "1": {"miou": 32.0}}
    rows = {tables.RGB: runs, "other": {"1": {"miou": 40.0}, "2": {"miou": 50.0}}}
    assert tables.gains(rows)["other"] == [8.0]
