"""Compares the members of a sweep: the best so far, curves, and a table.

Its source is the journal of the sweep, so a sweep that still runs has a page as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from urllib.parse import quote

from orchestrator.common.text import format_duration
from orchestrator.head.commands.sweep.journal import Journal, MemberState
from orchestrator.head.status.comparison import read_curves
from orchestrator.records.experiment import Experiment
from orchestrator.records.metrics.curves import Curve
from orchestrator.views.report.charts import MOST_LINES, Chart, ChartLine

# The page has no rows for members beyond this number, which are the worst.
MOST_MEMBERS = 1000
LONGEST_NAME = 40


@dataclass(frozen=True)
class Members:
    """All members of one sweep that have an event in its journal, the best first."""

    name: str
    metric: str
    # "least", "most" or empty.
    best: str
    began: float
    count: int
    every: Sequence[MemberState]
    # The directory with the experiments of the members.
    root: Path
    # Why the journal cannot be read.
    trouble: str = ""

    def curves(self) -> Chart | None:
        """Return the chart of the metric over the steps of the best members, None if unknown."""
        lines: list[ChartLine] = []
        for member in [one for one in self.every if one.experiment][:MOST_LINES]:
            known = read_curves(Experiment(self.root / member.experiment))
            if self.metric in known:
                name = f"{member.member}: {member.words}"[:LONGEST_NAME]
                lines.append(ChartLine(name, known[self.metric], len(lines), best=self.best))
        return Chart(f"{self.metric} by member", "", lines) if lines else None

    def best_so_far(self) -> Chart | None:
        """Return the chart of the best value so far and of each member's final value."""
        better = max if self.best == "most" else min
        known = {
            max(0, round(member.at - self.began)): member.value or 0.0
            for member in sorted(self.every, key=lambda one: one.at)
            if member.is_known
        }
        if not known or not self.best:
            return None
        values = list(known.values())
        lines = [
            ChartLine(
                "the best so far",
                Curve(list(known), list(accumulate(values, better))),
                best=self.best,
                stair=True,
            ),
            ChartLine("each member, when it ends", Curve(list(known), values), 7, 2, dots=True),
        ]
        return Chart(f"{self.metric}: the best so far", "", lines, over="time")

    def table(self) -> tuple[list[str], list[tuple[MemberState, list[str]]]]:
        """Return the headings of the members' own columns, and each member with its cells."""
        names = list(dict.fromkeys(name for member in self.every for name in member.values))
        rows = []
        for member in self.every[:MOST_MEMBERS]:
            cells = [member.values.get(name, "-") for name in names] or [member.words]
            if self.metric:
                cells.append("-" if member.value is None else f"{member.value:.6g}")
            rows.append(
                (member, [*cells, format_duration(member.seconds) if member.experiment else "-"])
            )
        return [*(names or ["values"]), *[self.metric] * bool(self.metric), "time"], rows

    def address(self, member: MemberState, live: bool) -> str:
        """Return the link to a member's page: of the dashboard, or of its report if it has one."""
        name = quote(member.experiment)
        if live:
            return f"/experiment/{name}"
        has_report = (self.root / member.experiment / "report.html").is_file()
        return f"../{name}/{'report.html' * has_report}"

    def summary(self) -> str:
        """Return the progress of the sweep."""
        states = [member.state for member in self.every]
        counts = [f"{states.count(state)} {state}" for state in sorted(set(states))]
        if (left := self.count - len(states)) > 0:
            counts.append(f"{left} to come")
        if (more := len(self.every) - MOST_MEMBERS) > 0:
            counts.append(f"{more} worse ones are left out")
        return ", ".join(counts) or "nothing was given out yet"


def read_members(journal: Journal) -> Members:
    """Return the state of each member so far."""
    about, events = journal.describe(), list(journal.read())
    # The last event of each member counts.
    every = list({event.member: event for event in events}.values())
    sign = -1 if about.best == "most" else 1
    known = [member for member in every if member.is_known]
    known.sort(key=lambda member: sign * (member.value or 0.0))
    others = [member for member in every if not member.is_known]
    began = min((event.at for event in events), default=0.0)
    return Members(
        journal.name,
        about.metric,
        about.best,
        began,
        about.count,
        [*known, *others],
        journal.path.parent,
    )
