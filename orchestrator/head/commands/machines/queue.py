"""`orchestrator nodes --queue`: who holds what of the nodes, who waits for it, and why."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.common import text
from orchestrator.common.errors import EXIT_DONE, EXIT_NODE, OrchestratorError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.facts import said_of
from orchestrator.head.screen import failures, output, styles
from orchestrator.head.screen.output import Cell, Column, Table, Terminal
from orchestrator.head.start.claims import obstacles
from orchestrator.head.start.nodes import try_all
from orchestrator.head.start.request import resolve
from orchestrator.protocol.requests.claims import WAITING, Entry, in_words
from orchestrator.protocol.requests.start import Page, ReadBook
from orchestrator.protocol.timing import QUICK_ANSWER_SECONDS


@dataclass(frozen=True)
class Line:
    """A job or a launch that waits, on all nodes where it has an entry."""

    entry: Entry
    on: Mapping[str, Entry]  # by the node's name
    place: int = 0  # in the queue; 0: it has what it wants
    why: str = ""  # it waits
    now: float = 0.0

    @property
    def waits(self) -> bool:
        return self.entry.state == WAITING


def state(line: Line) -> Cell:
    if line.waits:
        return f"waits, {line.place}.", styles.WARNING
    return line.entry.state


def what(line: Line) -> str:
    """Say what a job holds of its nodes, or wants of them."""
    each = {
        name: f"{one.wants} wanted" if line.waits else in_words(one.names)
        for name, one in line.on.items()
    }
    return "; ".join(said_of(each.items()))


def why(line: Line) -> str:
    return (line.why or "about to start") if line.waits else "-"


LINES: Table[Line] = Table(
    (
        Column("STATE", state),
        Column("USER", lambda line: line.entry.user),
        Column("JOB", lambda line: line.entry.job),
        Column("ON", what),
        Column("SINCE", lambda line: text.duration(round(max(0.0, line.now - line.entry.since)))),
        Column("WHY IT WAITS", why),
    )
)


Lost = Sequence[tuple[str, OrchestratorError]]


def read_books(arguments: LaunchArguments) -> tuple[list[tuple[Reached, Page]], Lost]:
    """Read the books of all nodes; return also which ones could not be asked, and why."""
    answered = try_all(resolve(arguments))
    books = fleet.ask(answered.reached, [ReadBook()] * len(answered.reached), QUICK_ANSWER_SECONDS)
    read = [
        (node, book)
        for node, book in zip(answered.reached, books, strict=True)
        if isinstance(book, Page)
    ]
    silent = failures.failures([node.node for node in answered.reached], books)
    return read, [(node.name, error) for node, error in (*answered.lost, *silent)]


def queue(arguments: LaunchArguments) -> int:
    read, lost = read_books(arguments)
    lines = list(lines_of(read, time.time()))
    problems = [{"name": name, "problem": error.what} for name, error in lost]
    data = {"jobs": [to_json(line) for line in lines], "lost": problems}
    output.result(data, partial(to_text, lines, lost))
    return EXIT_NODE if lost else EXIT_DONE


def lines_of(read: Iterable[tuple[Reached, Page]], now: float) -> Iterator[Line]:
    """Yield the jobs that hold something, and then who waits, the first in the queue first."""
    books: dict[str, Page] = {}
    found: dict[tuple[str, ...], dict[str, Entry]] = {}
    for node, book in read:
        books[node.node.name] = book
        for entry in book.entries:
            found.setdefault(whole(entry), {})[node.node.name] = entry
    firsts = {key: next(iter(on.values())) for key, on in found.items()}
    holding = [one for one in firsts.values() if one.state != WAITING]
    for one in sorted(holding, key=lambda entry: entry.since):
        yield Line(one, found[whole(one)], now=now)
    waiting = sorted(
        (one for one in firsts.values() if one.state == WAITING), key=lambda one: one.rank
    )
    for at, one in enumerate(waiting, 1):
        there = {name: seen_by(entry, books[name]) for name, entry in found[whole(one)].items()}
        reasons = obstacles(one, there, len(there))
        yield Line(
            one,
            found[whole(one)],
            place=at,
            why="; ".join(said_of(reasons.items())),
            now=now,
        )


def whole(entry: Entry) -> tuple[str, ...]:
    """Return what the entries of one job, or of one launch that waits, have in common."""
    return (entry.id,) if entry.state == WAITING else (entry.user, entry.job)


def seen_by(entry: Entry, book: Page) -> Page:
    """Return a node's book as a launch that waits there sees it: what others have is not free."""
    free = entry.of - sum(len(one.keys) for one in book.entries)
    return book.replace(free=max(0, free), total=entry.of, wants=entry.wants)


def to_json(line: Line) -> dict[str, Any]:
    entry = line.entry
    return {
        "id": entry.id,
        "state": entry.state,
        "user": entry.user,
        "job": entry.job,
        "head": entry.head,
        "since": entry.since,
        "place": line.place or None,
        "why": line.why,
        "nodes": {
            name: {"holds": list(one.names), "wants": one.wants} for name, one in line.on.items()
        },
    }


def to_text(lines: Sequence[Line], lost: Lost, terminal: Terminal) -> str:
    table = LINES.text(lines, terminal) if lines else "no job holds or waits for these nodes"
    reasons = failures.reasons((name, error.what, error.fix) for name, error in lost)
    return "\n\n".join(filter(None, [table, "\n".join(reasons)]))
