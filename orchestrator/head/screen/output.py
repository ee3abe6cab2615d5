"""The one way to the terminal: plain text for pipes, tables and colours for who looks on.

Whatever is printed may quote a node, a file or a machine that nobody has authenticated, so nothing
but line breaks, tabs and colours gets through. Rich draws what a terminal gets. It is imported only
then, and never sees text as its markup.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import functools
import io
import json
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

from orchestrator.common import text
from orchestrator.head.screen import styles
from orchestrator.head.screen.lines import clean

Cell = str | tuple[str, str]  # a text, or a text and its style, such as "bold red"
UNLIMITED_COLUMNS = 1 << 20
asked = {"json": False}  # what this command was called with
GONE = (errno.EPIPE, errno.EIO)  # nobody reads any more: a pipe, a terminal that was closed
FULL = (errno.ENOSPC, errno.EDQUOT)
# Of bars and small curves, where the terminal's encoding has no such letters.
DRAWN = {
    **dict(zip("▏▎▍▌▋▊▉█", "   -==##", strict=True)),
    **dict(zip("▁▂▃▄▅▆▇", "__..--=", strict=True)),
}
# No mouse, no pasted text in brackets, no second screen, and a cursor.
LEAVES_SCREEN = (
    b"\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?2004l\x1b[<u\x1b[?1049l\x1b[?25h"
)
OURS = "orchestrator:"  # begins each line that is none of the program
SHORT_COLUMNS = 20  # of a table that are no wider are never wrapped


@dataclass(frozen=True)
class Terminal:
    """The terminal that is written to, or a pipe, which has no width; with or without colours."""

    width: int | None = None
    color: bool = False


PLAIN = Terminal()


def terminal(out: TextIO | None = None) -> Terminal:
    """Describe standard output, or `out`."""
    terminal = (out or sys.stdout).isatty() and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns if terminal else None
    return Terminal(width, styles.shown(out))


def write_out(text: str) -> None:
    """Print lines on standard output, even a Latin-1 one; a reader that has left is no error."""
    pass_on(text if text.endswith("\n") or not text else text + "\n")


def pass_on(text: str, out: TextIO | None = None) -> bool:
    """Print text that may end within a line; tell whether anybody reads it.

    A Latin-1 terminal gets what it lacks as escapes such as \\u6f22, and bars of #.
    """
    out = out or sys.stdout
    if out is None:  # closed when the program began: a daemon's
        return False
    try:
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="drawn")  # it writes first what a reader has not taken
        with above_the_line():
            out.write(safe(text))
            out.flush()
    except OSError as error:
        if not is_full(error) and error.errno not in GONE:
            raise
        return False
    return True


def is_full(error: OSError) -> bool:
    """Tell whether there is no room for what is printed, and say so once.

    A job must not be left half started for that.
    """
    if error.errno in FULL:
        complain_once(f"standard output cannot be written: {error.strerror}")
    return error.errno in FULL


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace what an encoding lacks: bars and curves by letters as wide, all else by escapes."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    letters = (
        DRAWN.get(each) or each.encode("ascii", "backslashreplace").decode() for each in lacking
    )
    return "".join(letters), error.end


codecs.register_error("drawn", in_ascii)


def restorer() -> Callable[[], None]:
    """Return what brings back the terminal as it is now, where a whole screen is left at once."""
    try:
        before = termios.tcgetattr(0)
    except termios.error:
        return lambda: None

    def restore() -> None:
        signal.signal(signal.SIGCONT, signal.SIG_IGN)  # at which textual draws its screen again
        with contextlib.suppress(OSError, termios.error):
            os.write(2, LEAVES_SCREEN)
            termios.tcsetattr(0, termios.TCSANOW, before)

    return restore


@functools.cache
def complain_once(text: str) -> None:
    complain(text)


def typed_line() -> str:
    """Read a line from the terminal or the notebook; an empty text is the end of the input."""
    try:
        return input() + "\n"
    except EOFError:
        return ""
    except (OSError, RuntimeError, ValueError) as error:  # pytest's, a service's, a program's input
        complain(f"no line can be typed here: {error}")
        return ""


def agreed(question: str) -> bool:
    """Ask on the terminal; what is not a yes is a no."""
    complain(f"{question} [y/N] ", end="")
    return typed_line().strip().lower() in ("y", "yes")


def complain(text: str, end: str = "\n") -> None:
    """Print an error, a note or a question on standard error."""
    if sys.stderr is None:  # as above
        return
    try:
        with above_the_line():
            sys.stderr.write(safe(text) + end)
            sys.stderr.flush()
    except OSError as error:
        if error.errno not in GONE:
            raise


def safe(text: str) -> str:
    """Return text that a terminal only shows: line breaks, tabs and colours stay."""
    if text.replace("\n", "").isprintable():  # nearly always, and ten times faster
        return text
    return "\n".join(
        "\t".join(clean(part, color=True) for part in line.split("\t")) for line in text.split("\n")
    )


def say(text: str) -> None:
    """Tell the user something: a line on the terminal, or whatever listens (`heard_by`)."""
    (listeners[-1] if listeners else on_the_screen)(text)


def on_the_screen(text: str) -> None:
    """Print a line of our own, so that it is not taken for one of the program."""
    own(f"{styles.styled(OURS, styles.DIM)} {text}")


listeners: list[Callable[[str], None]] = []


@contextlib.contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Pass all that is said within to a listener, in place of the terminal."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def path(place: Path) -> str:
    """Return a path as it is typed in this directory."""
    return str(place.relative_to(Path.cwd())) if place.is_relative_to(Path.cwd()) else str(place)


def own(text: str) -> None:
    """Print a line that goes on with what was said, with colours if there are any."""
    write_out(text if styles.shown() else printable(text))


def as_json() -> bool:
    """Return True if this command was called with --json."""
    return asked["json"]


def result(data: object, words: Callable[[Terminal], str]) -> None:
    """Print the result of a command: with --json as JSON, else in words."""
    write_out(json.dumps(data, indent=1) if as_json() else words(terminal()))


def clear() -> None:
    """Let what follows replace all that a terminal shows; a pipe gets it after the rest."""
    if terminal().width is not None:
        sys.stdout.write("\x1b[H\x1b[J")


_moving = threading.RLock()  # whoever holds it may write to the terminal
_line = [""]  # that moves, below all that is printed


def status(line: str) -> None:
    """Replace the last line of a terminal on standard error; an empty one goes away."""
    with _moving, contextlib.suppress(OSError):
        _line[0] = clean(line, color=True)
        sys.stderr.write(f"\r\x1b[K{_line[0]}")
        sys.stderr.flush()


@contextlib.contextmanager
def above_the_line() -> Iterator[None]:
    """Take the moving line away while something else is printed."""
    with _moving:
        line = _line[0]
        if line:
            status("")
        yield
        if line:
            status(line)


def printable(text: str) -> str:
    """Return text without anything that a terminal would act on, not even colours."""
    return "\n".join(map(clean, text.split("\n")))


def paint(text: str, style: str, terminal: Terminal) -> str:
    """Return a text in a style, or unchanged where no colours show."""
    if not terminal.color:
        return printable(text)
    return "\n".join(table([[(line, style)]], Terminal(color=True)) for line in text.split("\n"))


def table(
    rows: Sequence[Sequence[Cell]],
    terminal: Terminal = PLAIN,
    *,
    right: Container[int] = (),
    headed: bool = False,
    indent: int = 0,
) -> str:
    """Align rows in columns, wrapped to a terminal's width; the first row may be headings.

    A name with a line break, as anybody's process may have, makes no row of its own.
    """
    cells = [[_styled(cell) for cell in row] for row in rows]
    if not rows or (terminal.width is None and not terminal.color):
        lines = text.table([[content for content, _ in row] for row in cells], right)
    else:
        lines = _drawn(cells, terminal, right, headed=headed, indent=indent)
    return "\n".join(" " * indent + line if line else "" for line in lines)


def _styled(cell: Cell) -> tuple[str, str]:
    content, style = (cell, "") if isinstance(cell, str) else cell
    return clean(content), style


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
            justify="right" if number in right else "left", no_wrap=short, overflow="fold"
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
NOTHING = "-"


@dataclass(frozen=True)
class Column(Generic[R]):
    """A heading and what stands below it; `absent` is shown of a row of which nothing is known."""

    heading: str
    cell: Callable[[R], Cell]
    absent: Callable[[R], Cell] = lambda _: NOTHING
    right: bool = False
    drop: int = 0  # where there is no room: the highest goes first, and 0 never


@dataclass(frozen=True)
class Table(Generic[R]):
    """Columns in their order."""

    columns: Sequence[Column[R]]
    is_absent: Callable[[R], bool] = lambda _: False
    indent: int = 0

    @property
    def headings(self) -> list[str]:
        return [column.heading for column in self.columns]

    def cells(self, row: R) -> list[Cell]:
        absent = self.is_absent(row)
        return [(column.absent if absent else column.cell)(row) for column in self.columns]

    def words(self, row: R) -> list[str]:
        """Return the cells of a row without their colours."""
        return [cell if isinstance(cell, str) else cell[0] for cell in self.cells(row)]

    def fitted(self, rows: Sequence[R], width: int | None) -> Table[R]:
        """Return the table without columns for which a terminal has no room, empty ones first."""
        body = [self.words(row) for row in rows if not self.is_absent(row)]
        names = [self.words(row)[0] for row in rows]
        wide = [
            max(map(len, (column.heading, *(names if at == 0 else (row[at] for row in body)))))
            for at, column in enumerate(self.columns)
        ]
        kept = list(range(len(self.columns)))
        says = [any(row[at] != "-" for row in body) for at in kept]
        for at in sorted(kept, key=lambda at: (says[at], -self.columns[at].drop)):
            fits = width is None or sum(wide[each] + 2 for each in kept) + 2 <= width
            if not fits and self.columns[at].drop:
                kept.remove(at)
        return replace(self, columns=[self.columns[at] for at in kept])

    def text(self, rows: Iterable[R], terminal: Terminal = PLAIN) -> str:
        """Lay the rows out below their headings."""
        headed = any(self.headings)
        body = [self.headings] * headed + [self.cells(row) for row in rows]
        right = [at for at, column in enumerate(self.columns) if column.right]
        return table(body, terminal, right=right, headed=headed, indent=self.indent)
