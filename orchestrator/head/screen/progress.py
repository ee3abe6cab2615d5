"""Shows the progress of work on a status line, which is removed at the end.

If the size is known it has a bar, the speed, the time left and the number of finished nodes.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from orchestrator.common import text
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.lines import fit_columns
from orchestrator.records.metrics import trainers

T = TypeVar("T")
R = TypeVar("R")
# The update interval; work that ends sooner shows no line.
FRAME_SECONDS = 0.2
BAR_COLUMNS = 20
SEPARATOR = " · "
# A job whose steps stand still for this long is said to do so.
STALL_SECONDS = 15.0


class ProgressBar:
    """Shows the number of bytes and nodes that are done; any thread may update it."""

    def __init__(self, what: str, size: int = 0, *, nodes: int = 0) -> None:
        self.what, self.size, self.nodes = what, size, nodes
        self.done = self.nodes_done = 0
        self.began = time.monotonic()
        # Transfers call add() from threads of their own.
        self.lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if sys.stderr is not None and sys.stderr.isatty():
            self._thread = threading.Thread(target=self._run, daemon=True, name="progress")
            self._thread.start()

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count

    def node_done(self) -> None:
        with self.lock:
            self.nodes_done += 1

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        shown = False
        while not self._over.wait(FRAME_SECONDS):
            shown = True
            output.set_status_line(self.line(shutil.get_terminal_size().columns - 1))
        if shown:
            output.set_status_line("")

    def line(self, columns: int) -> str:
        """Return the status line, cut to a number of columns."""
        nodes = f"{self.nodes_done}/{self.nodes} nodes" if self.nodes > 1 else ""
        seconds = time.monotonic() - self.began
        done = text.format_bytes(self.done) if self.done else ""
        if not self.size or not self.done:
            words = [f"{self.what} {nodes}".rstrip(), done, text.format_duration(round(seconds))]
            return fit_columns(SEPARATOR.join(filter(None, words)), columns)
        part = min(1.0, self.done / self.size)
        left = text.format_duration(round(seconds / part - seconds))
        words = [f"{part:.0%}", f"{done} of {text.format_bytes(self.size)}"]
        words += [f"{text.format_bytes(self.done / max(seconds, 0.001))}/s", f"{left} left", nodes]
        bar = ("#" * round(part * BAR_COLUMNS)).ljust(BAR_COLUMNS, "-")
        return fit_columns(f"{self.what} {bar} {SEPARATOR.join(filter(None, words))}", columns)


@contextmanager
def counted_work(
    what: str, work: Callable[[T], R], nodes: Sequence[T]
) -> Iterator[Callable[[T], R]]:
    """Show on how many nodes some work is done; yield the work with a counter around it."""
    with ProgressBar(what, nodes=len(nodes)) as progress:

        def counting(node: T) -> R:
            result = work(node)
            progress.node_done()
            return result

        yield counting


def join_parts(parts: Sequence[tuple[str, str, int]], columns: int) -> str:
    """Join (text, style, weight) parts; while there is no room, drop the one of most weight."""
    kept = [part for part in parts if part[0]]
    while len(kept) > 1 and len(SEPARATOR.join(part[0] for part in kept)) > columns:
        kept.remove(max(kept, key=lambda part: part[2]))
    line = fit_columns(SEPARATOR.join(part[0] for part in kept), columns)
    if len(line) < sum(len(part[0]) for part in kept):
        return line
    return SEPARATOR.join(styles.style_text(content, style) for content, style, _ in kept)


def stall_notice(experiment: Path) -> str:
    """Return `no step for 45 s` if the metrics of a job have not grown lately, else ""."""
    # A file may be removed at any moment.
    with contextlib.suppress(OSError):
        if path := trainers.file_of_first_rank(experiment / "outputs"):
            still = time.time() - path.stat().st_mtime
            return (
                f"no step for {text.format_duration(round(still))}"
                if still >= STALL_SECONDS
                else ""
            )
    return ""
