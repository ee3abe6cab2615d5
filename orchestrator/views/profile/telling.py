"""Say what the traces of a job's ranks say: a table and a picture for people, JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.common import text
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import Cell, Terminal
from orchestrator.traces import overlap
from orchestrator.traces.overlap import MOST_LINES, Overlap
from orchestrator.traces.rank import Rank
from orchestrator.views.profile import found, hint
from orchestrator.views.profile.found import Clocks, Trace
from orchestrator.views.profile.hint import Hint, ms
from orchestrator.views.templates import templates_in

TEMPLATES = templates_in(Path(__file__).parent / "web")
MOST_OPERATIONS = 8  # that are shown
WIDEST_CHARACTERS = 70  # of an operation's name
HEADINGS = {
    "compute": "COMPUTE",
    "hidden": "HIDDEN",
    "exposed": "EXPOSED",
    "copies": "COPIES",
    "data": "DATA",
    "idle": "IDLE",
}


@dataclass(frozen=True)
class Reading:
    """All that is known of a profile."""

    directory: Path
    traces: Sequence[Trace]
    overlap: Overlap
    clocks: Clocks
    hint: Hint | None

    def label(self, number: int) -> str:
        return next(trace.label for trace in self.traces if trace.number == number)

    @property
    def steps(self) -> tuple[int, int] | None:
        """Return the first and the last step, where the ranks have noted them."""
        about = self.traces[0].about
        first, last = (found.count(about.get(name), 0) for name in ("first", "last"))
        return (first, last) if 0 < first <= last else None

    @property
    def which(self) -> str:
        if self.steps is None:
            return text.plural(self.traces[0].rank.steps, "step")
        first, last = self.steps
        return f"steps {first} to {last}" if first < last else f"step {first}"


def read(
    directory: Path, traces: Sequence[Trace], measured: dict[int, tuple[float, float]]
) -> Reading:
    together = found.compared(traces)
    labels = {trace.number: trace.label for trace in traces}
    advice = hint.hint(together, traces[0].about, lambda number: labels[number])
    return Reading(directory, traces, together, found.clocks(traces, measured), advice)


def in_words(reading: Reading, terminal: Terminal) -> str:
    """Draw the table, what it means, the longest operations, and what to change."""
    ranks = reading.overlap.ranks
    columns = [
        name for name in PARTS if any(parts_of(rank)[name] >= 0.05 for rank in ranks.values())
    ]
    rows: list[list[Cell]] = [
        ["RANK", "HOST", "STEP", *(HEADINGS[name] for name in columns), "COMM", "WAITED", ""]
    ]
    shown = list(ranks)
    if len(shown) > MOST_LINES:  # those that the others wait for
        shown = sorted(
            sorted(shown, key=lambda number: reading.overlap.waited_ms[number])[:MOST_LINES]
        )
    hosts = {trace.number: trace.host for trace in reading.traces}
    for number in shown:
        rank, parts = ranks[number], parts_of(ranks[number])
        figures = [rank.window_ms / rank.steps, *(parts[name] for name in columns)]
        figures += [rank.communication_ms / rank.steps, reading.overlap.waited_ms[number]]
        slow = ("slowest", styles.WARNING) if number == reading.overlap.straggler else ""
        rows.append([str(number), hosts[number], *(f"{value:.1f}" for value in figures), slow])
    lines = [output.table(rows, terminal, headed=True, right=set(range(2, len(rows[0]) - 1)))]
    if len(ranks) > MOST_LINES:
        more = text.plural(len(ranks) - MOST_LINES, "more rank")
        lines.append(f"... and {more}, which waited longer: see --json")
    lines.append(f"{reading.which}, milliseconds per step; {overlap.reading(reading.overlap)}")
    lines += ["", *operations(reading, terminal)]
    if reading.hint is not None:
        lines += ["", output.paint(f"hint: {reading.hint.text}", styles.STRONG, terminal)]
        lines += [f"  {reading.hint.change}"] if reading.hint.change else []
    return "\n".join(lines)


def operations(reading: Reading, terminal: Terminal) -> list[str]:
    """List the longest operations of the rank that the others wait for least."""
    together = reading.overlap
    number = min(together.ranks, key=lambda rank: (together.waited_ms[rank], rank))
    rank = together.ranks[number]
    if not rank.top:
        return []
    rows: list[list[Cell]] = [
        ["MS PER STEP", "CALLS", f"OPERATION OF {reading.label(number).upper()}"]
    ]
    for one in rank.top[:MOST_OPERATIONS]:
        name = (
            one.name
            if len(one.name) <= WIDEST_CHARACTERS
            else one.name[: WIDEST_CHARACTERS - 3] + "..."
        )
        rows.append([f"{one.ms / rank.steps:.2f}", f"{one.calls / rank.steps:.4g}", name])
    return [output.table(rows, terminal, headed=True, right={0, 1})]


def as_data(reading: Reading, files: dict[str, str]) -> dict[str, Any]:
    """Return the result for JSON; times are milliseconds per step unless they say otherwise."""
    ranks = {}
    for trace in reading.traces:
        rank = reading.overlap.ranks[trace.number]
        parts = {f"{name}_ms": value for name, value in parts_of(rank).items()}
        ranks[str(trace.number)] = {
            "host": trace.host,
            "node": trace.node if trace.node >= 0 else None,
            "steps": rank.steps,
            "step_ms": rank.window_ms / rank.steps,
            **parts,
            "communication_ms": rank.communication_ms / rank.steps,
            "waited_ms": reading.overlap.waited_ms[trace.number],
            "top": [
                {"name": one.name, "ms": one.ms / rank.steps, "calls": one.calls / rank.steps}
                for one in rank.top
            ],
        }
    steps = reading.steps
    return {
        "directory": str(reading.directory),
        "steps": list(steps) if steps else None,
        "communication": reading.overlap.communication,
        "hidden": reading.overlap.hidden,
        "slowest": reading.overlap.straggler,
        "lag_ms": reading.overlap.lag_ms,
        "reading": overlap.reading(reading.overlap),
        "ranks": ranks,
        "hint": asdict(reading.hint) if reading.hint else None,
        "clocks": {"how": reading.clocks.how, "error_ms": reading.clocks.error_ms},
        "files": files,
    }


# -- the picture ----------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, TOP = 880, 190, 90, 84
BAR, GAP = 18, 6
THIN, DENSE = 5, 1  # of more ranks than fit on a screen
MANY = 40
PARTS = {
    "compute": "computing",
    "hidden": "computing and communicating",
    "exposed": "communicating only",
    "copies": "copies only",
    "data": "waiting for data",
    "idle": "idle",
}


def parts_of(rank: Rank) -> dict[str, float]:
    """Split a step into milliseconds that add up to it."""
    parts = {
        "compute": rank.compute_ms - rank.overlapped_ms,
        "hidden": rank.overlapped_ms,
        "exposed": rank.exposed_ms,
        "copies": rank.copying_ms,
        "data": rank.data_ms,
        "idle": rank.idle_ms - rank.data_ms,
    }
    return {name: max(0.0, value) / rank.steps for name, value in parts.items()}


@dataclass(frozen=True)
class Bars:
    """One rank's step in the picture."""

    y: int
    heading: str
    bars: list[tuple[str, float, str]]  # a part, its milliseconds, and both in words
    sum: str


def draw(overlap: Overlap, label: Callable[[int], str], title: str) -> str:
    """Draw the ranks' steps as one SVG file: a bar per rank, split into what it went into."""
    parts = {number: parts_of(rank) for number, rank in overlap.ranks.items()}
    many = len(parts) > MANY
    bar, gap = (THIN, DENSE) if many else (BAR, GAP)
    longest = max((sum(own.values()) for own in parts.values()), default=0.0) or 1.0
    rows = []
    for row, (number, own) in enumerate(parts.items()):
        whole = sum(own.values())
        rows.append(
            Bars(
                y=TOP + row * (bar + gap),
                heading=label(number) + " slowest" * (number == overlap.straggler)
                if not many or row % 8 == 0
                else "",
                bars=[
                    (name, value, part_in_words(label(number), name, value, whole))
                    for name, value in own.items()
                    if value > 0
                ],
                sum="" if many else ms(whole),
            )
        )
    return TEMPLATES.get_template("steps.svg").render(
        title=title,
        parts=PARTS,
        shown=[name for name in PARTS if any(own[name] > 0 for own in parts.values())],
        ticks=ticks(longest),
        rows=rows,
        thickness=bar,
        bottom=TOP + len(parts) * (bar + gap),
        scale=(WIDTH - LEFT - RIGHT) / longest,
        **{"width": WIDTH, "left": LEFT, "top": TOP},
    )


def part_in_words(who: str, name: str, value: float, whole: float) -> str:
    return f"{who}: {PARTS[name]} {ms(value)} ms, {value / whole:.0%} of the step"


def ticks(longest: float) -> list[float]:
    """Return round numbers from zero to the end of the axis."""
    unit = 10.0 ** (math.floor(math.log10(longest)) - 1)
    step = next(s * unit for s in (1, 2, 5, 10, 20, 50, 100) if longest / (s * unit) <= 8)
    return [round(step * n, 9) for n in range(int(longest / step) + 1)]
