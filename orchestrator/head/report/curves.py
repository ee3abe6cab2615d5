"""Reads metrics files into as many points as a screen has: a mean and a range for each.

The lines come from nodes and may be of any length and content, half written, or of a program of the
user's own: what is no number is passed over.
"""

from __future__ import annotations

import json
import math
import operator
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator import files
from orchestrator.records import trainers
from orchestrator.records.last_metrics import LARGEST, number

LONGEST_LINE = 1 << 20
PLACES = 256  # of a large file, to know when its steps were
MOST_NAMES = 64
WHOLE = 4 << 20  # bytes of a file that is read from end to end, also where a sample would do
END = 1 << 16  # bytes at a file's end in which its last line lies
ABOUT = ("time", "rank", "step")  # where a line belongs; all else is measured

Line = dict[str, Any]


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


@dataclass
class _Point:
    step: int = 0  # the last of those that share it
    total: float = 0.0
    count: int = 0
    low: float = math.inf
    high: float = -math.inf

    def add(self, step: int, values: Sequence[float]) -> None:
        """Add values up to this step, many at once: of a million lines each is taken in C."""
        known = [value for value in values if abs(value) < LARGEST]  # NaN is not either
        if known:
            self.step = max(self.step, step)
            self.total += math.fsum(known)
            self.count += len(known)
            self.low = min(self.low, *known)
            self.high = max(self.high, *known)

    @property
    def mean(self) -> float:
        return self.total / self.count


def span(path: Path) -> tuple[int, int] | None:
    """Return the first and the last step of a file without reading what lies between."""
    with files.open_plain(path) as file:
        first = next((step for _, step in _lines(file)), None)
        file.seek(max(0, os.fstat(file.fileno()).st_size - END))
        steps = [step for _, step in _lines(file)]
    if first is None:
        return None
    return first, max([first, *steps])


def step_times(outputs: Path) -> list[tuple[int, float]]:
    """Return steps of the lowest rank and when they were logged, few of them where many are."""
    paths = trainers.every(outputs).get(1, {})
    if not paths:
        return []
    with files.open_plain(paths[min(paths)]) as file:
        pairs = [(step, number(line, "time")) for line, step in _sample(file, PLACES)]
    return sorted((step, when) for step, when in pairs if when is not None)


def curves(path: Path, points: int) -> dict[str, Curve]:
    """Read every line of one rank's file into at most `points` points of each metric."""
    steps = span(path)
    if steps is None:
        return {}
    first, width = steps[0], _width(steps, points)
    found: dict[str, dict[int, _Point]] = {}
    waiting: dict[str, list[float]] = {}  # of the column that is being read
    here = (0, 0)  # this column, and the last step in it
    with files.open_plain(path) as file:
        for line, step in _lines(file):
            column = (step - first) // width
            if column != here[0]:
                _settle(waiting, found, *here)
            here = column, step
            for name, value in line.items():
                if type(value) is float or type(value) is int:
                    if name in waiting:
                        waiting[name].append(value)
                    elif name not in ABOUT and len(waiting) < MOST_NAMES:
                        waiting[name] = [value]
    _settle(waiting, found, *here)
    return {name: _curve(kept) for name, each in found.items() if (kept := _counted(each))}


def _settle(
    waiting: dict[str, list[float]], found: dict[str, dict[int, _Point]], column: int, step: int
) -> None:
    """Make points of the values that wait; a file may come back to a column later."""
    for name, values in waiting.items():
        found.setdefault(name, {}).setdefault(column, _Point()).add(step, values)
        values.clear()


def rank_maps(paths: dict[int, Path], names: Sequence[str], columns: int) -> dict[str, RankMap]:
    """Read metrics of all ranks; of large files a few lines for each column."""
    spans = [steps for path in paths.values() if (steps := span(path))]
    if not spans:
        return {}
    steps = min(first for first, _ in spans), max(last for _, last in spans)
    width = _width(steps, columns)
    count = (steps[1] - steps[0]) // width + 1
    ranks = sorted(paths)
    rows: dict[str, list[list[float | None]]] = {name: [] for name in names}
    for rank in ranks:
        cells: dict[str, dict[int, _Point]] = {name: {} for name in names}
        with files.open_plain(paths[rank]) as file:
            for line, step in _sample(file, count):
                column = (step - steps[0]) // width
                for name in names:
                    value = number(line, name)
                    if value is not None and 0 <= column < count:
                        cells[name].setdefault(column, _Point()).add(step, [value])
        for name in names:
            row = [cells[name].get(column) for column in range(count)]
            rows[name].append([None if point is None else point.mean for point in row])
    known = [
        column
        for column in range(count)
        if any(row[column] is not None for each in rows.values() for row in each)
    ]
    starts = [steps[0] + column * width for column in known]
    return {
        name: RankMap(starts, ranks, [[row[column] for column in known] for row in each])
        for name, each in rows.items()
    }


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


def _width(steps: tuple[int, int], columns: int) -> int:
    return (steps[1] - steps[0]) // columns + 1


def _counted(points: dict[int, _Point]) -> list[_Point]:
    return [points[column] for column in sorted(points) if points[column].count]


def _curve(ordered: Sequence[_Point]) -> Curve:
    return Curve(
        [point.step for point in ordered],
        [point.mean for point in ordered],
        [point.low for point in ordered],
        [point.high for point in ordered],
    )


def _sample(file: BinaryIO, columns: int) -> Iterator[tuple[Line, int]]:
    """Read a small file whole, and of a large one the lines at four places of each column."""
    size = os.fstat(file.fileno()).st_size
    if size <= WHOLE:
        yield from _lines(file)
        return
    for place in range(columns * 4):
        file.seek(size * place // (columns * 4))
        if place:
            file.readline(LONGEST_LINE)  # the rest of a line
        yield from _parsed(file.readline(LONGEST_LINE))


def _lines(file: BinaryIO) -> Iterator[tuple[Line, int]]:
    while raw := file.readline(LONGEST_LINE):
        yield from _parsed(raw)


def _parsed(raw: bytes) -> Iterator[tuple[Line, int]]:
    try:
        line = json.loads(raw)
        step = line["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return  # half a line, or somebody else's
    if type(step) is int and 0 <= step < 1 << 53:
        yield line, step
