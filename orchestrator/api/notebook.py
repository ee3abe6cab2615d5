"""Shows a job in a notebook: its state as HTML, a line that moves while it waits, a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from orchestrator.common.text import table
from orchestrator.records.experiment import JobRecord
from orchestrator.records.metrics import progress, trainers
from orchestrator.records.metrics.lines import GrowingFile

SHOWN_ROWS = 20
UNSEEN = ("time", "rank")  # in a table of one rank, over its steps
COLORS = {"done": "#1a7f37", "failed": "#cf222e", "lost": "#cf222e", "stopped": "#9a6700"}


class Metrics(list[dict[str, float]]):
    """Lists what rank 0 measured: a row for each step that it told of."""

    @property
    def columns(self) -> list[str]:
        """The names of the values that the table shows, step and loss first."""
        names = dict.fromkeys(name for row in self for name in row if name not in UNSEEN)
        first = [name for name in ("step", "loss") if name in names]
        return [*first, *(name for name in names if name not in first)]

    def __str__(self) -> str:
        return "\n".join(table(list(self._cells()), range(len(self.columns))))

    def _repr_html_(self) -> str:
        heading, *rows = self._cells()
        head = "".join(f"<th>{escape(name)}</th>" for name in heading)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _cells(self) -> Iterable[list[str]]:
        """Yield the headings and the last rows as text."""
        yield self.columns
        for row in self[-SHOWN_ROWS:]:
            yield [f"{row[name]:.6g}" if name in row else "" for name in self.columns]


def metrics(experiment: Path) -> Metrics:
    """Read what rank 0 of the Trainer that is at work measured, or what its program printed."""
    _, files = trainers.newest(experiment / "outputs")
    found = Metrics()
    if files:
        lines = map(trainers.Point, GrowingFile(files[min(files)]).lines())
        found.extend(
            point.numbers(len(point.line), ()) for point in lines if point.step is not None
        )
    return found


def words(experiment: Path, record: JobRecord) -> str:
    """Say in one line how far a job is."""
    known, _ = progress.of(experiment, record, progress.all_steps(experiment, record))
    return " · ".join([f"{len(record.nodes)} nodes", *progress.parts(known)])


def html(name: str, experiment: Path, record: JobRecord, cause: str = "") -> str:
    """Return a job's state, how far it is, and why it failed."""
    color = COLORS.get(record.state, "inherit")
    state = f'<b style="color:{color}">{escape(record.state)}</b>'
    line = f"{escape(name)}: {state} · {escape(words(experiment, record))}"
    return f"<div>{line}{f'<pre>{escape(cause)}</pre>' if cause else ''}</div>"


def live() -> Callable[[str], None] | None:
    """Return what shows HTML in place of the last in a notebook's cell; elsewhere nothing."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    if not getattr(shell, "kernel", None):
        return None
    show = ipython.display
    handle = show.display(show.HTML(""), display_id=True)
    return lambda text: handle.update(show.HTML(text))
