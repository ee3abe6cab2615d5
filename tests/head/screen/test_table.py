"""Tables whose columns are known: how they are laid out, and that no column lacks page or test."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.commands.machines.nodes import MACHINES
from orchestrator.head.screen.output import PLAIN, Column, Table, Terminal
from orchestrator.views.top import table as top

ROOT = Path(__file__).parents[3]
PAGES = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
# Each table, and the test that compares all cells of its rows.
TABLES = {
    "nodes": (MACHINES, "tests/head/commands/test_nodes.py"),
    "nodes of top": (top.NODES, "tests/views/top/test_table.py"),
    "jobs of top": (top.job_table(0.0), "tests/views/top/test_table.py"),
    "ranks of top": (top.RANKS, "tests/views/top/test_table.py"),
}


@pytest.mark.parametrize(("table", "test"), TABLES.values(), ids=TABLES)
def test_every_column_is_documented_and_tested(table: Table[Any], test: str) -> None:
    headings = [heading for heading in table.headings if heading]
    heads = [line.split("  ") for line in PAGES.splitlines() if line.startswith(headings[0])]
    assert headings in [[cell.strip() for cell in line if cell] for line in heads]
    cases = (ROOT / test).read_text()
    assert all(f'"{heading}": ' in cases for heading in headings), "compare the new column as well"


def shown(rows: Sequence[int], terminal: Terminal = PLAIN, **options: Any) -> list[str]:
    columns = (
        Column[int]("N", str, absent=lambda _: "none", right=True),
        Column[int]("SQUARE", lambda n: (str(n * n), "red")),
        Column[int]("CUBE", lambda n: str(n**3)),
    )
    return Table(columns, is_absent=lambda n: n < 0, **options).text(rows, terminal).splitlines()


def test_rows_align_below_headings() -> None:
    assert shown([2, -1, 30]) == [
        "   N  SQUARE  CUBE",
        "   2  4       8",
        "none  -       -",
        "  30  900     27000",
    ]
    assert shown([], indent=2) == ["  N  SQUARE  CUBE"]


def test_fitted_drops_empty_columns_first() -> None:
    columns = (
        Column[int]("ONE", str),
        Column[int]("NONE", lambda _: "-", drop=1),
        Column[int]("SOME", lambda n: "-" if n > 1 else "yes", drop=2),
    )
    headings = [Table(columns).fitted([1, 2], width).headings for width in (19, 18, 13, 12)]
    assert headings == [["ONE", "NONE", "SOME"], *[["ONE", "SOME"]] * 2, ["ONE"]]


@pytest.mark.parametrize("width", range(22, 53))
def test_cut_columns_share_what_is_left(width: int) -> None:
    cells = {"KEPT": "a word", "LONG": "x" * 20, "LONGER": "y" * 40}
    columns = [
        Column[int](name, lambda _, cell=cell: cell, least=6 * (name != "KEPT"))  # type: ignore[misc]
        for name, cell in cells.items()
    ]
    heading, row = Table(columns).text([1], Terminal(width)).splitlines()
    assert heading.split() == list(cells) and row.startswith("a word  xxxxx")
    assert width - 2 < len(row) <= width and row.endswith("…")
