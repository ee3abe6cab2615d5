"""Makes curves and maps of ranks of the metrics files: a mean and a range for each point."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.records.last_metrics import LARGEST_STEP, step_of
from orchestrator.views.report.points import Points
from orchestrator.views.report.reading import KEPT, Line, Reading, Told

POINTS = 1000  # of each curve, as many as a wide screen has room for
COLUMNS = 240  # of a map of ranks
PLACES = 4  # of each column of a map: of a large file, the lines there are read
MOST_CELLS = 256 * COLUMNS  # of a map of one metric: that of very many ranks has fewer columns
ABOUT = ("rank", "step")  # where a line belongs; all else is measured


@dataclass(frozen=True)
class Curve:
    """One metric over the steps. Where several steps share a point: their mean and range."""

    steps: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class RankMap:
    """One metric of every rank over the steps: a row for each rank, None where nothing is known."""

    steps: list[int]  # where each column begins
    ranks: list[int]
    rows: list[list[float | None]]


def curves(path: Path, points: int) -> dict[str, Curve]:
    """Read one rank's file into at most `points` points of each metric, and of the time."""
    reading = KEPT.look((path, "curves"), lambda: Reading(path, measured, POINTS))
    halvings = 0
    if reading.columns is not None:
        first, last = reading.columns
        while (last >> halvings) - (first >> halvings) >= points:
            halvings += 1
    every = {name: curve_of(each.halved(halvings)) for name, each in reading.points.items()}
    return {name: curve for name, curve in every.items() if curve.steps}


def measured(line: Line) -> Told | None:
    """Return what a line says of its step; None for half a line, or somebody else's."""
    step = line.get("step")
    if type(step) is not int or not 0 <= step < LARGEST_STEP:  # of a million lines, nearly none
        step = step_of(line)
        if step is None:
            return None
    for name in ABOUT:
        line.pop(name, None)
    return step, line


def curve_of(points: Points) -> Curve:
    kept = [at for at, count in enumerate(points.counts) if count]
    return Curve(
        [points.steps[at] for at in kept],
        [points.totals[at] / points.counts[at] for at in kept],
        [points.lows[at] for at in kept],
        [points.highs[at] for at in kept],
    )


def rank_maps(
    paths: Mapping[int, Path], names: Sequence[str], columns: int = COLUMNS
) -> dict[str, RankMap]:
    """Read metrics of all ranks; of large files a few lines for each column."""
    columns = max(2, min(columns, MOST_CELLS // max(1, len(paths))))
    wanted = tuple(names)

    def told(line: Line) -> Told | None:
        known = measured(line)
        return known and (known[0], {name: line[name] for name in wanted if name in line})

    readings = [
        KEPT.look(
            (paths[rank], wanted, columns),
            lambda path=paths[rank]: Reading(path, told, columns, columns * PLACES),  # type: ignore[misc]
        )
        for rank in sorted(paths)
    ]
    shift, first, last = common(readings, columns)
    rows = {name: [row(each, name, shift, first, last) for each in readings] for name in names}
    known = [
        at
        for at in range(last - first + 1)
        if any(each[at] is not None for every in rows.values() for each in every)
    ]
    starts = [first + at << shift for at in known]
    return {
        name: RankMap(starts, sorted(paths), [[each[at] for at in known] for each in every])
        for name, every in rows.items()
        if known
    }


def common(
    readings: Sequence[Reading], columns: int, begin: int | None = None
) -> tuple[int, int, int]:
    """Return columns in which all readings have room: their shift, the first, and the last."""
    spans = [steps for each in readings if (steps := each.steps) is not None]
    if not spans:
        return 0, 0, -1
    shift = max(each.shift for each in readings)
    first = min(steps[0] for steps in spans) if begin is None else begin
    last = max(steps[1] for steps in spans)
    while (last >> shift) - (first >> shift) >= columns:
        shift += 1
    return shift, first >> shift, last >> shift


def row(reading: Reading, name: str, shift: int, first: int, last: int) -> list[float | None]:
    """Return the mean of each column from the first to the last, where there is one."""
    points = reading.points.get(name, Points())
    return points.halved(shift - reading.shift).means(first, last)


def ahead(found: RankMap) -> tuple[int, float] | None:
    """Return the rank whose values are the highest, and its usual distance from the median rank."""
    distances: list[list[float]] = [[] for _ in found.ranks]
    for column in range(len(found.steps)):
        known = [(i, v) for i, row in enumerate(found.rows) if (v := row[column]) is not None]
        middle = median([value for _, value in known])
        for i, value in known:
            distances[i].append(value - middle)
    pairs = zip(distances, found.ranks, strict=True)
    usual = ((rank, statistics.median_low(each)) for each, rank in pairs if each)
    return max(usual, key=operator.itemgetter(1), default=None)


def median(values: Sequence[float]) -> float:
    return statistics.median_low(values) if values else 0.0
