"""Tables whose columns are known: a column is its heading and the cell it makes of a row.

A column is added in one place, and every view of that table has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from orchestrator.head.screen import output
from orchestrator.head.screen.output import PLAIN, Cell, Terminal

R = TypeVar("R")
NOTHING = "-"


@dataclass(frozen=True)
class Column(Generic[R]):
    """A heading and what stands below it; `absent` is shown of a row of which nothing is known."""

    heading: str
    cell: Callable[[R], Cell]
    absent: Callable[[R], Cell] = lambda _: NOTHING
    right: bool = False


@dataclass(frozen=True)
class Table(Generic[R]):
    """Columns in their order."""

    columns: Sequence[Column[R]]
    is_absent: Callable[[R], bool] = lambda _: False
    indent: int = 0
    second: int = 0  # the column that begins a second table, where one is too wide for a terminal

    @property
    def headings(self) -> list[str]:
        return [column.heading for column in self.columns]

    def cells(self, row: R) -> list[Cell]:
        absent = self.is_absent(row)
        return [(column.absent if absent else column.cell)(row) for column in self.columns]

    def words(self, row: R) -> list[str]:
        """Return the cells of a row without their colours."""
        return [cell if isinstance(cell, str) else cell[0] for cell in self.cells(row)]

    def text(self, rows: Iterable[R], terminal: Terminal = PLAIN) -> str:
        """Lay the rows out below their headings; as two tables where one is too wide."""
        body = [self.cells(row) for row in rows]
        if not self.second or fits(self._drawn(body, range(len(self.columns)), PLAIN), terminal):
            return self._drawn(body, range(len(self.columns)), terminal)
        parts = range(self.second), (0, *range(self.second, len(self.columns)))
        return "\n\n".join(self._drawn(body, part, terminal) for part in parts)

    def _drawn(
        self, body: Sequence[Sequence[Cell]], numbers: Sequence[int], terminal: Terminal
    ) -> str:
        headed = any(self.headings)
        rows = [[row[at] for at in numbers] for row in ([self.headings] * headed + list(body))]
        right = [at for at, number in enumerate(numbers) if self.columns[number].right]
        return output.table(rows, terminal, right=right, headed=headed, indent=self.indent)


def fits(text: str, terminal: Terminal) -> bool:
    return terminal.width is None or max(map(len, text.splitlines())) <= terminal.width
