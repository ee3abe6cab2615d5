"""Shows how far a sweep is: a table that is drawn anew, a line for each end, JSON at its end."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from orchestrator.common.text import duration
from orchestrator.config.label import shown
from orchestrator.head.commands.sweep.sweep import MemberEnd, Sweep
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import Cell, Column, Table, Terminal

DRAW_SECONDS = 0.5
BEST, RUNNING, FAILED, LONGEST = 5, 8, 3, 60
BAD = ("failed", "lost", "not started")


@dataclass(frozen=True)
class Row:
    """A member that has ended, or one that was given out."""

    number: int
    words: str
    state: str
    value: float | None = None
    seconds: float | None = None
    where: str = ""
    step: int | None = None  # of a value that is not the last one


@dataclass
class Board:
    """Shows a sweep; called in each turn, and with each end."""

    metric: str
    best: str  # least, most or nothing
    live: bool  # on a terminal
    began: float = field(default_factory=time.monotonic)
    drawn: float = -math.inf

    def __call__(self, sweep: Sweep, end: MemberEnd | None) -> None:
        if self.live:
            if time.monotonic() > self.drawn + DRAW_SECONDS:
                self.drawn = time.monotonic()
                output.clear()
                output.write_out(self.text(sweep, output.terminal()))
        elif end is not None:
            output.say(self.line(sweep, end))

    def line(self, sweep: Sweep, end: MemberEnd) -> str:
        """Say what came of a member."""
        value = f", {self.metric} {end.value:.6g}" if end.value is not None else ""
        why = f": {first_line(end.problem)}" if end.problem else ""
        of = f"{len(sweep.ends)}/{len(sweep.supply)}"
        took = f" after {duration(end.seconds)}" if end.experiment else ""
        return f"{of}: {end.member} ({cut(end.words)}) {end.state}{took}{value}{why}"

    def ranked(self, sweep: Sweep, most: int, *, worst: bool = False) -> list[MemberEnd]:
        """Return the best members so far, the best first; or the worst."""
        done = (end for end in sweep.ends.values() if end.state == "done")
        known = (end for end in done if end.value is not None)
        sign = -1 if (self.best == "most") != worst else 1
        return heapq.nsmallest(most, known, key=lambda end: sign * (end.value or 0.0))

    def summary(self, sweep: Sweep) -> str:
        counts = Counter(end.state for end in sweep.ends.values())
        running = sum(one.place is not None for one in sweep.started.values())
        parts = {
            "running": running,
            "waiting": len(sweep.started) - running,
            **dict(sorted(counts.items())),
            "to come": len(sweep.left),
        }
        words = [f"{count} {state}" for state, count in parts.items() if count]
        took = duration(round(time.monotonic() - self.began))
        return f"{sweep.journal.name}: {', '.join(words) or 'nothing to do'}; {took}"

    def rows(self, sweep: Sweep) -> Iterator[Row]:
        """Yield the best and the worst, those that run, and those that failed last."""
        best = self.ranked(sweep, BEST + 1)
        yield from map(row_of, best[:BEST])
        if len(best) > BEST:
            yield Row(-1, "and the worst:", "")
            yield row_of(self.ranked(sweep, 1, worst=True)[0])
        started = sorted(
            sweep.started.values(), key=lambda one: (one.place is None, one.member.number)
        )
        for one in started[:RUNNING]:
            place = one.place.name if one.place else ""
            since = time.time() - one.began
            state = "running" if one.place else "waiting"
            of = (one.member.number, one.member.words, state, one.value, round(since), place)
            yield Row(*of, one.step)
        if len(started) > RUNNING:
            yield Row(-1, f"{len(started) - RUNNING} more", "")
        bad = [end for end in sweep.ends.values() if end.state in BAD]
        yield from map(row_of, bad[-FAILED:])
        if len(bad) > FAILED:
            yield Row(-1, f"{len(bad) - FAILED} more have failed", "")

    def text(self, sweep: Sweep, terminal: Terminal) -> str:
        rows = list(self.rows(sweep))
        columns = [
            Column[Row](
                "MEMBER", lambda row: str(row.number) if row.number >= 0 else "", right=True
            ),
            Column[Row]("VALUES", lambda row: cut(row.words)),
            Column[Row]("STATE", lambda row: (row.state, styles.STATES.get(row.state, ""))),
            *([Column[Row](self.metric, value_of, right=True)] if self.metric else []),
            Column[Row](
                "TIME", lambda row: duration(row.seconds) if row.seconds else "", right=True
            ),
            Column[Row]("EXPERIMENT", lambda row: cut(row.where)),
        ]
        return "\n".join(
            [self.summary(sweep), *([Table(columns).text(rows, terminal)] if rows else [])]
        )

    def closing(self, sweep: Sweep) -> list[str]:
        """Say what is usually typed next."""
        name = sweep.journal.name
        lines = [f"all of them: orchestrator ls --all --tag {name}"]
        lines += [f"compare: orchestrator report {name}"] if sweep.ends else []
        return lines


def to_json(sweep: Sweep, board: Board, code: int) -> dict[str, Any]:
    best = board.ranked(sweep, 1) if board.best else []
    return {
        "sweep": sweep.journal.name,
        "directory": str(sweep.journal.path),
        "metric": board.metric or None,
        "best": vars(best[0]) if best else None,
        "members": [vars(sweep.ends[number]) for number in sorted(sweep.ends)],
        "left": len(sweep.left),
        "exit_code": code,
    }


def row_of(end: MemberEnd) -> Row:
    where = first_line(end.problem) if end.state in BAD else end.experiment
    return Row(end.member, end.words, end.state, end.value, end.seconds, where or end.experiment)


def value_of(row: Row) -> Cell:
    if row.value is None:
        return ""
    return f"{row.value:.6g}{'' if row.step is None else f' at step {row.step}'}"


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def cut(text: str) -> str:
    text = shown(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
