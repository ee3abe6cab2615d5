"""How far a piece of work is: one line of a terminal that moves, and goes away at the end.

A bar where the size is known, with the speed, the time that is left and the nodes that are done.
"""

from __future__ import annotations

import io
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from orchestrator.common import text
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.lines import fit

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

T = TypeVar("T")
R = TypeVar("R")
FRAME_SECONDS = 0.2  # between two looks of the line; what is done before the first shows none
MOST_COLUMNS = 120  # of a line with a bar
SEPARATOR = " · "


class Progress:
    """Shows how many bytes are done, and on how many nodes, from any thread."""

    def __init__(self, what: str, size: int = 0, *, nodes: int = 0, quiet: bool = False) -> None:
        self.what, self.size, self.nodes = what, size, nodes
        self.done = self.nodes_done = 0
        self.began = time.monotonic()
        self.lock = threading.Lock()  # transfers add from threads of their own
        self._over = threading.Event()
        self._bars: Bars | None = None
        self._thread: threading.Thread | None = None
        if sys.stderr is not None and sys.stderr.isatty() and not quiet:
            self._thread = threading.Thread(target=self._run, daemon=True, name="progress")
            self._thread.start()

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count

    def node_done(self) -> None:
        with self.lock:
            self.nodes_done += 1

    def clear(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def _run(self) -> None:
        shown = False
        while not self._over.wait(FRAME_SECONDS):
            shown = True
            output.status(self.line(shutil.get_terminal_size().columns - 1))
        if shown:
            output.status("")

    def line(self, columns: int) -> str:
        """Return the line for so many columns."""
        nodes = f"{self.nodes_done}/{self.nodes} nodes" if self.nodes > 1 else ""
        if not self.size:
            done = text.size(self.done) if self.done else ""
            seconds = text.duration(round(time.monotonic() - self.began))
            words = [f"{self.what} {nodes or ''}".rstrip(), done, seconds]
            return fit(SEPARATOR.join(filter(None, words)), columns)
        return self._bar(nodes, columns)

    def _bar(self, nodes: str, columns: int) -> str:
        from rich.console import Console

        bars = self._bars = self._bars or bars_of(self.what)
        (task,) = bars.tasks
        bars.update(task.id, total=self.size, completed=min(self.done, self.size))
        words = [f"{text.size(self.done)} of {text.size(self.size)}"]
        if task.speed:
            words.append(f"{text.size(task.speed)}/s")
        if task.time_remaining is not None:
            words.append(f"{text.duration(task.time_remaining)} left")
        bars.update(task.id, words=SEPARATOR.join(filter(None, [*words, nodes])))
        colored = styles.shown(sys.stderr)
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        out = io.TextIOWrapper(io.BytesIO(), encoding, "replace")
        console = Console(
            file=out,
            width=max(20, min(columns, MOST_COLUMNS)),
            force_terminal=True,
            no_color=not colored,
            color_system="standard" if colored else None,
            _environ={},
        )
        with console.capture() as captured:
            console.print(bars.get_renderable(), crop=True, overflow="crop")
        return captured.get().split("\n")[0].rstrip()


def bars_of(what: str) -> Bars:
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    bars = Bars(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(min_width=6, ratio=1)),
        TaskProgressColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[words]}", markup=False, table_column=Column(no_wrap=True)),
        auto_refresh=False,
        expand=True,
    )
    bars.add_task(what, total=None, words="")
    return bars


@contextmanager
def counted(what: str, work: Callable[[T], R], nodes: Sequence[T]) -> Iterator[Callable[[T], R]]:
    """Show on how many of the nodes some work is done; give the work that counts them."""
    with Progress(what, nodes=len(nodes)) as progress:

        def counting(node: T) -> R:
            result = work(node)
            progress.node_done()
            return result

        yield counting


def joined(parts: Sequence[tuple[str, str, int]], columns: int) -> str:
    """Join texts with their styles, as many as there is room for: the heaviest go first."""
    kept = [part for part in parts if part[0]]
    while len(kept) > 1 and len(SEPARATOR.join(part[0] for part in kept)) > columns:
        kept.remove(max(kept, key=lambda part: part[2]))
    line = fit(SEPARATOR.join(part[0] for part in kept), columns)
    if len(line) < sum(len(part[0]) for part in kept):
        return line
    return SEPARATOR.join(styles.styled(content, style) for content, style, _ in kept)
