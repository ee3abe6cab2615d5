"""All output to the terminal: plain text for pipes, tables and colours for terminals.

Printed text may quote a node, a file or a machine that was not authenticated. Of control characters
only line breaks, tabs and colours are therefore passed on. The secrets of this process's launches
are hidden. Rich draws tables on a terminal. It is imported only then, and never parses text as
markup.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import logging
import os
import shutil
import signal
import sys
import termios
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TextIO, TypeVar

from orchestrator.common import hiding, text
from orchestrator.head.screen import styles
from orchestrator.head.screen.lines import clean_line, fit_columns

log = logging.getLogger(__name__)

# A text, or a text and its style, such as "bold red".
Cell = str | tuple[str, str]
UNLIMITED_COLUMNS = 1 << 20
# Where a command called with --json prints its result; empty without --json.
json_to: list[TextIO] = []
# Errors of a pipe or a terminal whose reader has closed it.
GONE = (errno.EPIPE, errno.EIO)
FULL = (errno.ENOSPC, errno.EDQUOT)
# Turns off the mouse, bracketed paste and the alternate screen, and shows the cursor.
LEAVES_SCREEN = (
    b"\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?2004l\x1b[<u\x1b[?1049l\x1b[?25h"
)
# The prefix of our own lines among those of the program.
OURS = "orchestrator:"
# Columns of a table up to this width are never wrapped.
SHORT_COLUMNS = 20


@dataclass(frozen=True)
class Terminal:
    """The width of the terminal (None for a pipe), and whether colours are shown."""

    width: int | None = None
    color: bool = False


PLAIN = Terminal()


def terminal_of(out: TextIO | None = None) -> Terminal:
    """Return the Terminal of standard output, or of `out`."""
    terminal = (out or sys.stdout).isatty() and os.environ.get("TERM") != "dumb"
    return Terminal(
        shutil.get_terminal_size().columns if terminal else None, styles.colors_shown(out)
    )


def write_out(text: str) -> bool:
    """Print lines of a result as text; with --json, print nothing, as print_result() has it all.

    Return False if the output is closed or full.
    """
    return as_json() or pass_on(text if text.endswith("\n") or not text else f"{text}\n")


def pass_on(text: str, out: TextIO | None = None) -> bool:
    """Print text that may end within a line; return False if the output is closed or full.

    Characters that the encoding lacks become escapes such as \\u6f22.
    """
    out = out or sys.stdout
    # Standard output was closed when the program began, as for a daemon.
    if out is None:
        return False
    try:
        if isinstance(out, io.TextIOWrapper):
            # reconfigure() flushes pending output first, which can fail as well.
            out.reconfigure(errors="backslashreplace")
        with above_the_line():
            out.write(safe_text(text))
            out.flush()
    except OSError as error:
        if not is_output_full(error) and error.errno not in GONE:
            raise
        return False
    return True


def is_output_full(error: OSError) -> bool:
    """Return True if an error says that the disk of the output is full; report it once.

    A full disk must not abort a job while it is being started.
    """
    if error.errno in FULL:
        complain_once(f"standard output cannot be written: {error.strerror}")
    return error.errno in FULL


def terminal_restorer() -> Callable[[], None]:
    """Return a function that restores the current terminal state after a full-screen program."""
    try:
        before = termios.tcgetattr(0)
    except termios.error:
        return lambda: None

    def restore() -> None:
        # On SIGCONT, textual would draw its screen again.
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        with contextlib.suppress(OSError, termios.error):
            os.write(2, LEAVES_SCREEN)
            termios.tcsetattr(0, termios.TCSANOW, before)

    return restore


@functools.cache
def complain_once(text: str) -> None:
    complain(text)


def read_answer(question: str) -> str | None:
    """Return the line that the user types after a question; None if there is none to read.

    The input has ended, or is that of pytest, a service or a pipe.
    """
    complain(f"{question} ", end="")
    try:
        return input().strip()
    except (EOFError, OSError, RuntimeError, ValueError):
        return None


def user_agrees(question: str) -> bool:
    """Return True if the user answers y or yes to a question on the terminal."""
    return (read_answer(f"{question} [y/N]") or "").lower() in ("y", "yes")


def complain(text: str, end: str = "\n") -> None:
    """Print an error, a note or a question on standard error."""
    # Standard error was closed when the program began.
    if sys.stderr is None:
        return
    try:
        with above_the_line():
            sys.stderr.write(safe_text(text) + end)
            sys.stderr.flush()
    except OSError as error:
        if error.errno not in GONE:
            raise


def safe_text(text: str) -> str:
    """Return text without secrets and control characters except line breaks, tabs and colours."""
    # This is the usual case, and ten times faster.
    if (text := hiding.without_secrets(text)).replace("\n", "").isprintable():
        return text
    return "\n".join(
        "\t".join(clean_line(part, color=True) for part in line.split("\t"))
        for line in text.split("\n")
    )


def short_path(place: Path) -> str:
    """Return a path relative to this directory if it is below it, else unchanged."""
    return str(place.relative_to(Path.cwd())) if place.is_relative_to(Path.cwd()) else str(place)


def print_own_line(text: str) -> None:
    """Print a line of our own without the prefix; colours are removed if they are off."""
    pass_on(f"{text if styles.colors_shown() else printable_text(text)}\n")


def as_json() -> bool:
    """Return True if this command was called with --json."""
    return bool(json_to)


@contextlib.contextmanager
def json_alone() -> Iterator[None]:
    """Print results as JSON within the block; everything else goes to standard error."""
    json_to.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        json_to.pop()


def print_result(
    data: object, words: Callable[[Terminal], str] = lambda _: "", *, indent: int | None = 1
) -> bool:
    """Print the result of a command, with --json as JSON, else as text.

    Return False if the output is closed or full.
    """
    if as_json():
        return pass_on(f"{json.dumps(data, indent=indent)}\n", json_to[-1])
    return write_out(words(terminal_of()))


def clear_screen() -> None:
    """Clear the screen of a terminal; for a pipe, do nothing."""
    if terminal_of().width is not None:
        sys.stdout.write("\x1b[H\x1b[J")


# The lock that a thread holds while it writes to the terminal.
_moving = threading.RLock()
# The status line, which stays below all other output.
_line = [""]


def set_status_line(line: str) -> None:
    """Replace the status line of a terminal on standard error; "" removes it."""
    with _moving, contextlib.suppress(OSError):
        _line[0] = clean_line(hiding.without_secrets(line), color=True)
        sys.stderr.write(f"\r\x1b[K{_line[0]}")
        sys.stderr.flush()


@contextlib.contextmanager
def above_the_line() -> Iterator[None]:
    """Remove the status line while other output is printed in the block."""
    with _moving:
        line = _line[0]
        if line:
            set_status_line("")
        yield
        if line:
            set_status_line(line)


def printable_text(text: str) -> str:
    """Return text without control characters and without colours."""
    return "\n".join(map(clean_line, text.split("\n")))


def paint_text(text: str, style: str, terminal: Terminal) -> str:
    """Return a text in a style, or without colours if the terminal shows none."""
    return styles.style_text(printable_text(text), style if terminal.color else "")


def format_table(
    rows: Sequence[Sequence[Cell]],
    terminal: Terminal = PLAIN,
    *,
    right: Container[int] = (),
    headed: bool = False,
    indent: int = 0,
) -> str:
    """Return rows as aligned columns, wrapped to a terminal's width; the first may be headings.

    A line break in a cell, as in the name of a process, does not start a new row.
    """
    cells = [[_styled(cell) for cell in row] for row in rows]
    if not rows or (terminal.width is None and not terminal.color):
        lines = text.align_columns([[content for content, _ in row] for row in cells], right)
    else:
        lines = _drawn(cells, terminal, right, headed=headed, indent=indent)
    return "\n".join(" " * indent + line if line else "" for line in lines)


def _styled(cell: Cell) -> tuple[str, str]:
    content, style = (cell, "") if isinstance(cell, str) else cell
    return clean_line(content), style


def _drawn(
    cells: list[list[tuple[str, str]]],
    terminal: Terminal,
    right: Container[int],
    *,
    headed: bool,
    indent: int,
) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for number, column in enumerate(zip(*cells, strict=True)):
        short = max(len(content) for content, _ in column) <= SHORT_COLUMNS
        grid.add_column(
            justify="right" if number in right else "left",
            no_wrap=short,
            overflow="ellipsis" if short else "fold",
        )
    for number, row in enumerate(cells):
        heading = "bold" if headed and number == 0 else ""
        grid.add_row(*(Text(content, style=style or heading) for content, style in row))
    console = Console(
        file=io.StringIO(),
        width=max(1, terminal.width - indent) if terminal.width else UNLIMITED_COLUMNS,
        force_terminal=terminal.color,
        no_color=not terminal.color,
        color_system="standard" if terminal.color else None,
        _environ={},
    )
    with console.capture() as captured:
        console.print(grid, crop=False)
    return [line.rstrip() for line in captured.get().splitlines()]


# -- tables whose columns are known ----------------------------------------------------------------
# A column is added in one place, and every view of that table has it.

R = TypeVar("R")
EMPTY = {"", "-"}
# The columns between two cells.
GAP = 2


@dataclass(frozen=True)
class Column(Generic[R]):
    """A heading and its cells; `absent` is the cell of a row whose values are unknown."""

    heading: str
    cell: Callable[[R], Cell]
    absent: Callable[[R], Cell] = lambda _: "-"
    right: bool = False
    # If there is no room, the column with the highest value is dropped first; 0: never.
    drop: int = 0
    # If there is no room, its cells are cut, at most to this width; 0: never.
    least: int = 0

    def cut(self, width: int) -> Column[R]:
        """Return the column with cells of at most this width."""
        return replace(
            self,
            cell=lambda row: _cut(self.cell(row), width),
            absent=lambda row: _cut(self.absent(row), width),
        )


def _cut(cell: Cell, width: int) -> Cell:
    content, style = _styled(cell)
    return (content if len(content) <= width else f"{fit_columns(content, width - 1)}…"), style


@dataclass(frozen=True)
class Table(Generic[R]):
    """A table with these columns, in order."""

    columns: Sequence[Column[R]]
    is_absent: Callable[[R], bool] = lambda _: False
    indent: int = 0

    @property
    def headings(self) -> list[str]:
        return [column.heading for column in self.columns]

    def cells(self, row: R) -> list[Cell]:
        return [(one.absent if self.is_absent(row) else one.cell)(row) for one in self.columns]

    def words(self, row: R) -> list[str]:
        """Return the cells of a row without their colours."""
        return [cell if isinstance(cell, str) else cell[0] for cell in self.cells(row)]

    def fitted(self, rows: Sequence[R], width: int | None) -> Table[R]:
        """Return the table for this width, with columns that are cut or dropped.

        Columns that may be dropped are cut first. Then empty ones are dropped, then those with the
        highest `drop`. The others are cut last.
        """
        # The reason why a row is absent takes no room of other columns.
        lines = [
            [
                word[: one.least or None] if self.is_absent(row) else word
                for one, word in zip(self.columns, self.words(row), strict=True)
            ]
            for row in rows
        ]
        cells = list(zip(self.headings, *lines, strict=True))
        wide = [max(map(len, column)) for column in cells]
        # A column that may be dropped takes no more than its least width from the others.
        need = [
            min(size, one.least or size) if one.drop else size
            for size, one in zip(wide, self.columns, strict=True)
        ]
        kept = list(range(len(self.columns)))
        spare = (UNLIMITED_COLUMNS if width is None else width) - sum(need) - GAP * (1 + len(need))
        for at in sorted(
            kept, key=lambda at: (not EMPTY.issuperset(cells[at][1:]), -self.columns[at].drop)
        ):
            if spare < 0 and self.columns[at].drop:
                kept.remove(at)
                spare += need[at] + GAP
            elif spare < 0:
                need[at] = min(wide[at], self.columns[at].least or wide[at])
                spare += wide[at] - need[at]
        # The columns that are cut share what is left, each up to its own width.
        for left, at in enumerate(sorted(kept, key=lambda at: wide[at] - need[at]), -len(kept)):
            more = min(wide[at] - need[at], max(0, spare) // -left)
            need[at] += more
            spare -= more
        return replace(
            self, columns=[self.columns[at].cut(need[at] + max(0, spare)) for at in kept]
        )

    def text(self, rows: Iterable[R], terminal: Terminal = PLAIN) -> str:
        """Return the rows as text below their headings, in the width of the terminal."""
        every = list(rows)
        # Text needs no gap at its ends, as the cells of a live table do.
        shown = self.fitted(every, terminal.width and terminal.width + 2 * GAP - self.indent)
        body = [shown.headings] * any(shown.headings) + [shown.cells(row) for row in every]
        return format_table(
            body,
            terminal,
            right=[at for at, column in enumerate(shown.columns) if column.right],
            headed=any(shown.headings),
            indent=self.indent,
        )
