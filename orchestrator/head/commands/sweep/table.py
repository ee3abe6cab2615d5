"""Shows how a sweep goes: a line for each end, then the best members, and JSON."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any

from orchestrator.common.text import duration
from orchestrator.config.label import shown
from orchestrator.head.commands.sweep.sweep import MemberEnd, Sweep
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import Column, Table, Terminal

BEST, FAILED, LONGEST = 5, 3, 60
BAD = ("failed", "lost", "not started")


def line(sweep: Sweep, end: MemberEnd) -> None:
    """Print what came of a member."""
    value = f", {sweep.metric} {end.value:.6g}" if end.value is not None else ""
    why = f": {first_line(end.problem)}" if end.problem else ""
    of = f"{len(sweep.ends)}/{len(sweep.supply)}"
    took = f" after {duration(end.seconds)}" if end.experiment else ""
    output.say(f"{of}: {end.member} ({cut(end.words)}) {end.state}{took}{value}{why}")


def ranked(sweep: Sweep, best: str) -> list[MemberEnd]:
    """Return the best members, the best first."""
    known = [one for one in sweep.ends.values() if one.state == "done" and one.value is not None]
    sign = -1 if best == "most" else 1
    return heapq.nsmallest(BEST, known, key=lambda end: sign * (end.value or 0.0))


def text(sweep: Sweep, best: str, terminal: Terminal) -> str:
    """Return the summary, the best members and those that failed last."""
    counts = Counter(end.state for end in sweep.ends.values())
    parts = {**dict(sorted(counts.items())), "not begun": len(sweep.left)}
    words = ", ".join(f"{count} {state}" for state, count in parts.items() if count)
    bad = [end for end in sweep.ends.values() if end.state in BAD]
    rows = [*ranked(sweep, best), *bad[-FAILED:]]
    lines = [f"{sweep.journal.name}: {words or 'nothing to do'}"]
    columns = (
        Column[MemberEnd]("MEMBER", lambda end: str(end.member), right=True),
        Column[MemberEnd]("VALUES", lambda end: cut(end.words)),
        Column[MemberEnd]("STATE", lambda end: (end.state, styles.STATES.get(end.state, ""))),
        Column[MemberEnd](
            sweep.metric, lambda end: "" if end.value is None else f"{end.value:.6g}", right=True
        ),
        Column[MemberEnd]("EXPERIMENT", lambda end: end.experiment or first_line(end.problem)),
    )
    return "\n".join([*lines, *([Table(columns).text(rows, terminal)] if rows else [])])


def to_json(sweep: Sweep, best: str, code: int) -> dict[str, Any]:
    found = ranked(sweep, best) if best else []
    return {
        "sweep": sweep.journal.name,
        "directory": str(sweep.journal.path),
        "metric": sweep.metric or None,
        "best": vars(found[0]) if found else None,
        "members": [vars(sweep.ends[number]) for number in sorted(sweep.ends)],
        "left": len(sweep.left),
        "exit_code": code,
    }


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def cut(text: str) -> str:
    text = shown(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
