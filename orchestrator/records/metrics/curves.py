"""Make curves and maps of ranks of metrics files that grow: a mean and a range for each point.

Only what was added is read, and what is kept of a file is bounded: sums over columns of steps. The
lines may be of any length and content, half written, or of a program of the user's own.
"""

from __future__ import annotations

import contextlib
import operator
import os
import statistics
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from orchestrator.common import files
from orchestrator.records.metrics.columns import Columns
from orchestrator.records.metrics.lines import GrowingFile, Line, parsed
from orchestrator.records.metrics.trainers import LARGEST_STEP, Point, shortened

POINTS = 1000  # of each curve, as many as a wide screen has room for
MAP_COLUMNS = 240  # of a map of ranks
PLACES = 4  # of each column of a map: of a large file, the lines there are read
MOST_CELLS = 256 * MAP_COLUMNS  # of a map: one of very many ranks has fewer columns
MOST_NAMES = 64
PIECE_BYTES = 1 << 20  # that are in memory at once
WHOLE_BYTES = 1 << 19  # that are read from end to end where a sample would do
LINE_BYTES = 1 << 20  # of the longest line that is sampled
CACHE_BYTES = 16 << 20  # of sums: of the files that were read last
PLACE_OF_LINE = ("rank", "step")  # where a line belongs; all else is measured

Measured = tuple[int, Mapping[str, Any]]  # a step, and what a line says of it


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


# -- one file ---------------------------------------------------------------------------------


class FileSums:
    """The sums of one file, in at most so many columns of steps.

    With `places`, of what has grown by much only lines at so many places are read, for their means.
    """

    def __init__(
        self, path: Path, measured: Callable[[Line], Measured | None], columns: int, places: int = 0
    ) -> None:
        self.measured, self.most, self.places = measured, columns, places
        self.file = GrowingFile(path, piece=PIECE_BYTES)
        self.forget()

    def forget(self) -> None:
        self.replaced = self.file.replaced
        self.metrics: dict[str, Columns] = {}
        self.shift = 0  # a column has 2**shift steps
        self.columns: tuple[int, int] | None = None  # the first, and the last

    @property
    def steps(self) -> tuple[int, int] | None:
        """Return the first step of the first column, and the last step of the last one."""
        if self.columns is None:
            return None
        return self.columns[0] << self.shift, (self.columns[1] + 1 << self.shift) - 1

    @property
    def size(self) -> int:
        return sum(columns.size for columns in self.metrics.values())

    def read(self) -> None:
        """Read what is new; a file that was cut off or written anew is read from its beginning."""
        if self.places and self.file.unread() > WHOLE_BYTES:
            self.feed(self.sampled())
            self.file.skip()
        while lines := self.file.read():
            self.feed(lines)

    def sampled(self) -> Iterator[Line]:
        """Yield lines from places that lie evenly in what is new."""
        begin = self.file.at
        try:
            with files.open_plain(self.file.path) as file:
                new = os.fstat(file.fileno()).st_size - begin
                # The last one soon: from then on it is known how many steps a column has.
                for place in (0, self.places - 1, *range(1, self.places - 1)):
                    file.seek(begin + new * place // self.places)
                    if place:
                        file.readline(LINE_BYTES)  # the rest of a line
                    if (line := parsed(file.readline(LINE_BYTES))) is not None:
                        yield line
        except OSError:  # it has gone meanwhile
            return

    def feed(self, lines: Iterable[Line]) -> None:
        if self.replaced != self.file.replaced:
            self.forget()
        waiting: dict[str, list[float]] = {}  # of the column that is being read
        here, last = -1, 0
        for line in lines:
            if (measured := self.measured(line)) is None:
                continue
            step, values = measured
            if step >> self.shift != here:
                self.settle(waiting, here, last)
                here, last = self.column_of(step), step
            last = max(last, step)
            for name, value in values.items():
                if type(value) is float or type(value) is int:
                    if name in waiting:
                        waiting[name].append(value)
                    elif (short := shortened(name)) in self.metrics or (
                        len(self.metrics) < MOST_NAMES
                    ):
                        self.metrics.setdefault(short, Columns(ranges=not self.places))
                        waiting[name] = [value]
        self.settle(waiting, here, last)

    def settle(self, waiting: dict[str, list[float]], column: int, step: int) -> None:
        """Add the values that wait; a file may come back to a column later."""
        for name, values in waiting.items():
            if values:
                self.metrics[shortened(name)].add(column, step, values)
                values.clear()

    def column_of(self, step: int) -> int:
        """Return the column of a step, which may need more steps in each to have room."""
        at = step >> self.shift
        first, last = self.columns or (at, at)
        first, last, more = min(first, at), max(last, at), 0
        while (last >> more) - (first >> more) >= self.most:
            more += 1
        if more:
            self.shift += more
            self.metrics = {name: sums.halved(more) for name, sums in self.metrics.items()}
        self.columns = first >> more, last >> more
        return at >> more

    def means(self, name: str, shift: int, first: int, last: int) -> list[float | None]:
        """Return the mean of each of these columns, where there is one."""
        return self.metrics.get(name, Columns()).halved(shift - self.shift).means(first, last)


class Cache:
    """The sums of the files that were read last, as many as there is room for."""

    def __init__(self, most: int = CACHE_BYTES) -> None:
        self.most = most
        self.sums: OrderedDict[Hashable, FileSums] = OrderedDict()
        self.lock = threading.Lock()  # of the two maps; files have the lock of their directory
        self.in_use: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()

    @contextlib.contextmanager
    def alone(self, directory: Path) -> Iterator[None]:
        """Be the only one that reads these files: two pages may show the same experiment."""
        with self.lock:
            lock = self.in_use.setdefault(directory, threading.Lock())
        with lock:
            yield

    def read(
        self,
        path: Path,
        what: Hashable,
        measured: Callable[[Line], Measured | None],
        columns: int,
        places: int = 0,
    ) -> FileSums:
        """Return the sums of what is measured in a file, with what is new in it."""
        key = path, what, columns
        with self.lock:
            known = self.sums.pop(key, None) or FileSums(path, measured, columns, places)
            self.sums[key] = known
        known.read()
        return known

    def make_room(self) -> None:
        """Forget those that nobody has read for the longest."""
        with self.lock:
            size = sum(sums.size for sums in self.sums.values())
            while size > self.most:
                size -= self.sums.popitem(last=False)[1].size


CACHE = Cache()


# -- curves and maps --------------------------------------------------------------------------


def curves(path: Path, points: int) -> dict[str, Curve]:
    """Read one rank's file into at most `points` points of each metric, and of the time."""
    sums = CACHE.read(path, "curves", measured, POINTS)
    halvings = 0
    if sums.columns is not None:
        first, last = sums.columns
        while (last >> halvings) - (first >> halvings) >= points:
            halvings += 1
    every = {name: curve_of(columns.halved(halvings)) for name, columns in sums.metrics.items()}
    return {name: curve for name, curve in every.items() if curve.steps}


def measured(line: Line) -> Measured | None:
    """Return what a line says of its step; None for half a line, or somebody else's."""
    step = line.get("step")
    if type(step) is not int or not 0 <= step < LARGEST_STEP:  # of a million lines, nearly none
        step = Point(line).step
        if step is None:
            return None
    for name in PLACE_OF_LINE:
        line.pop(name, None)
    return step, line


def curve_of(columns: Columns) -> Curve:
    kept = [at for at, count in enumerate(columns.counts) if count]
    return Curve(
        [columns.steps[at] for at in kept],
        [columns.totals[at] / columns.counts[at] for at in kept],
        [columns.lows[at] for at in kept],
        [columns.highs[at] for at in kept],
    )


def rank_maps(
    paths: Mapping[int, Path], names: Sequence[str], columns: int = MAP_COLUMNS
) -> dict[str, RankMap]:
    """Read metrics of all ranks; of large files a few lines for each column."""
    columns = max(2, min(columns, MOST_CELLS // max(1, len(paths))))
    wanted = tuple(names)

    def of_map(line: Line) -> Measured | None:
        known = measured(line)
        return known and (known[0], {name: line[name] for name in wanted if name in line})

    files_of_ranks = [
        CACHE.read(paths[rank], wanted, of_map, columns, columns * PLACES) for rank in sorted(paths)
    ]
    shift, first, last = shared_columns(files_of_ranks, columns)
    rows = {
        name: [sums.means(name, shift, first, last) for sums in files_of_ranks] for name in names
    }
    known = [
        at
        for at in range(last - first + 1)
        if any(row[at] is not None for of_name in rows.values() for row in of_name)
    ]
    starts = [first + at << shift for at in known]
    return {
        name: RankMap(starts, sorted(paths), [[row[at] for at in known] for row in of_name])
        for name, of_name in rows.items()
        if known
    }


def shared_columns(
    every: Sequence[FileSums], columns: int, begin: int | None = None
) -> tuple[int, int, int]:
    """Return columns in which all have room: their shift, the first, and the last."""
    spans = [steps for sums in every if (steps := sums.steps) is not None]
    if not spans:
        return 0, 0, -1
    shift = max(sums.shift for sums in every)
    first = min(steps[0] for steps in spans) if begin is None else begin
    last = max(steps[1] for steps in spans)
    while (last >> shift) - (first >> shift) >= columns:
        shift += 1
    return shift, first >> shift, last >> shift


def ahead(of_ranks: RankMap) -> tuple[int, float] | None:
    """Return the rank whose values are the highest, and its usual distance from the median rank."""
    distances: list[list[float]] = [[] for _ in of_ranks.ranks]
    for column in range(len(of_ranks.steps)):
        known = [(i, v) for i, row in enumerate(of_ranks.rows) if (v := row[column]) is not None]
        middle = median([value for _, value in known])
        for i, value in known:
            distances[i].append(value - middle)
    pairs = zip(distances, of_ranks.ranks, strict=True)
    usual = ((rank, statistics.median_low(each)) for each, rank in pairs if each)
    return max(usual, key=operator.itemgetter(1), default=None)


def median(values: Sequence[float]) -> float:
    return statistics.median_low(values) if values else 0.0
