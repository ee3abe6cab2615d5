"""Compares the members of a sweep: parallel coordinates, the best so far, a table. Pure but `read`.

What it reads is the journal of the sweep, so a sweep that still runs has a page, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.common.text import duration
from orchestrator.head.commands.sweep.journal import Journal
from orchestrator.records.metrics.curves import Curve
from orchestrator.views.report.charts import Chart, Line

WIDTH, EDGE = 1000, 60  # of the picture, and what is beside its first and last axis
TOP, BOTTOM = 34, 300  # of an axis
MOST_AXES, MOST_LABELS, LONGEST_LABEL = 10, 12, 16
MOST_MEMBERS = 1000  # on a page: those that are worse have no line there, and no row
FAR = 100  # times the least value is the most of an axis that is better logarithmic
LOOKS = 5  # of lines, from the best to the worst
NOT_OVER = "not over"
ENDED_WITHOUT = ("failed", "lost", "not started")


@dataclass(frozen=True)
class Run:
    """One member, as far as the journal knows it."""

    number: int
    state: str
    values: Mapping[str, str]
    words: str
    value: float | None = None  # of the metric
    seconds: float = 0.0
    at: float = 0.0  # when it ended
    experiment: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Members:
    """All members of one sweep that were given out, the best first."""

    name: str
    metric: str
    best: str  # least, most or nothing
    began: float
    count: int
    runs: Sequence[Run]


@dataclass(frozen=True)
class Axis:
    """One vertical line of the picture, and what is written beside it."""

    name: str
    x: int
    labels: Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Path:
    """The line of one member through all axes, and its look: how good it is, or its state."""

    run: Run
    look: str
    points: str


def read(journal: Journal) -> Members:
    """Read what became of the members so far."""
    about = journal.describe()
    found: dict[int, dict[str, Any]] = {}
    began = math.inf
    for event in journal.read():
        began = min(began, event.get("at", 0.0))
        found[event["member"]] = {"state": NOT_OVER, **event}
    runs = [
        Run(number, **{name: of[name] for name in KNOWN if name in of})
        for number, of in found.items()
    ]
    most = about.best == "most"
    runs.sort(key=lambda run: (not is_known(run), order(run, most), run.number))
    return Members(journal.name, about.metric, about.best, began, about.count, runs)


KNOWN = [name for name in Run.__dataclass_fields__ if name != "number"]


def is_known(run: Run) -> bool:
    """Tell whether a member has a value that others can be compared with."""
    return run.state == "done" and run.value is not None and math.isfinite(run.value)


def order(run: Run, most: bool) -> float:
    return (-(run.value or 0.0) if most else run.value or 0.0) if is_known(run) else 0.0


# -- the best so far --------------------------------------------------------------------------


def over_time(members: Members) -> list[Chart]:
    """Return the chart of the best value so far, and of what each member has come to."""
    better = max if members.best == "most" else min
    each: dict[int, float] = {}
    for run in sorted(filter(is_known, members.runs), key=lambda one: one.at):
        second = max(0, round(run.at - members.began))
        each[second] = better(each.get(second, run.value or 0.0), run.value or 0.0)
    if not each or not members.best:
        return []
    best: list[float] = []
    for value in each.values():
        best.append(better(value, best[-1]) if best else value)
    lines = [
        Line("the best so far", Curve(list(each), best), best=members.best),
        Line("each member, when it ends", Curve(list(each), list(each.values())), 7, 2),
    ]
    return [Chart(f"{members.metric}: the best so far", "", lines, over="time")]


# -- parallel coordinates ---------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Where a value stands on its axis: 0 is the bottom, 1 the top."""

    places: Mapping[str, float]
    labels: Sequence[tuple[float, str]]


def coordinates(members: Members) -> tuple[list[Axis], list[Path]]:
    """Return the axes of what the members differ in, the metric last, and a line for each member.

    The worst come first: what is drawn later lies above.
    """
    runs = members.runs[:MOST_MEMBERS]
    names = [name for name in parameters(members) if len({r.values.get(name) for r in runs}) > 1]
    names = names[:MOST_AXES]
    known = [run for run in runs if is_known(run)]
    if not names:
        return [], []
    scales = [scale_of([run.values[name] for run in runs if name in run.values]) for name in names]
    if known:
        names.append(members.metric)
        scales.append(scale_of([repr(run.value) for run in known]))
    step = (WIDTH - 2 * EDGE) / max(1, len(names) - 1)
    axes = [
        Axis(name, round(EDGE + at * step), [(height(place), text) for place, text in scale.labels])
        for at, (name, scale) in enumerate(zip(names, scales, strict=True))
    ]
    paths = []
    for at, run in reversed(list(enumerate(runs))):
        words = [*(run.values.get(name, "") for name in names), repr(run.value)]
        if known:
            words[len(names) - 1] = repr(run.value) if is_known(run) else ""
        pairs = zip(axes, scales, words, strict=False)
        points = [
            f"{axis.x},{height(scale.places[word])}"
            for axis, scale, word in pairs
            if word in scale.places
        ]
        paths.append(Path(run, look_of(run, at, len(known)), " ".join(points)))
    return axes, paths


def parameters(members: Members) -> list[str]:
    return list(dict.fromkeys(name for run in members.runs for name in run.values))


def look_of(run: Run, at: int, known: int) -> str:
    if not is_known(run):
        return "failed" if run.state in ENDED_WITHOUT else "other"
    return f"good-{at * LOOKS // known} {'best' if at == 0 else ''}".strip()


def height(place: float) -> float:
    return round(BOTTOM - place * (BOTTOM - TOP), 1)


def scale_of(values: Sequence[str]) -> Scale:
    """Place values by what they are as numbers, or one above the other where some are none."""
    distinct = list(dict.fromkeys(values))
    numbers = {value: number for value in distinct if (number := number_of(value)) is not None}
    if len(numbers) < len(distinct):
        last = max(1, len(distinct) - 1)
        places = {value: at / last for at, value in enumerate(distinct)}
        return Scale(places, few([(place, short(value)) for value, place in places.items()]))
    least, most = min(numbers.values()), max(numbers.values())
    logarithmic = least > 0 and most / least >= FAR
    if logarithmic:
        numbers = {value: math.log(number) for value, number in numbers.items()}
        least, most = math.log(least), math.log(most)
    size = (most - least) or 1.0
    places = {value: (number - least) / size for value, number in numbers.items()}
    if len(distinct) <= MOST_LABELS:
        return Scale(places, few(sorted((place, short(value)) for value, place in places.items())))
    ends = [(at / 4, least + at / 4 * size) for at in range(5)]
    written = [(at, f"{math.exp(n) if logarithmic else n:.3g}") for at, n in ends]
    return Scale(places, written)


def few(labels: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Leave out labels that would lie on each other."""
    kept: list[tuple[float, str]] = []
    for place, text in labels:
        if not kept or place - kept[-1][0] >= 1 / MOST_LABELS:
            kept.append((place, text))
    return kept


def number_of(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def short(value: str) -> str:
    number = number_of(value)
    text = f"{number:.4g}" if number is not None and len(value) > LONGEST_LABEL else value
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 3]}..."


# -- the table --------------------------------------------------------------------------------


def table(members: Members) -> tuple[list[str], Iterator[tuple[Run, list[str]]]]:
    """Return the headings of the members' own columns, and their cells."""
    names = parameters(members)
    headings = names or ["values"]
    if members.metric:
        headings = [*headings, members.metric]

    def rows() -> Iterator[tuple[Run, list[str]]]:
        for run in members.runs[:MOST_MEMBERS]:
            cells = [run.values.get(name, "-") for name in names] if names else [run.words]
            if members.metric:
                cells.append("-" if run.value is None else f"{run.value:.6g}")
            yield run, [*cells, duration(run.seconds) if run.experiment else "-"]

    return [*headings, "time"], rows()


def summary(members: Members) -> str:
    """Say how far the sweep is, and which value is the best."""
    states = [run.state for run in members.runs]
    counts = [f"{states.count(state)} {state}" for state in sorted(set(states))]
    left = members.count - len(states)
    counts += [f"{left} to come"] if left > 0 else []
    lines = "; the best first" if any(map(is_known, members.runs)) else ""
    more = len(members.runs) - MOST_MEMBERS
    shown = f"; {more} worse ones are left out" if more > 0 else ""
    return f"{', '.join(counts) or 'nothing was given out yet'}{lines}{shown}"
