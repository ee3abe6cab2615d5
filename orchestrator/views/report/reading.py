"""Reads files of metrics that grow: each look reads what was added, and keeps bounded sums of all.

The lines come from nodes and may be of any length and content, half written, or of a program of the
user's own: what is no number is passed over.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from orchestrator.common import files
from orchestrator.records.added_lines import AddedLines, parsed
from orchestrator.records.last_metrics import shortened
from orchestrator.views.report.points import Points

PIECE = 1 << 20  # bytes that are in memory at once
WHOLE = 1 << 19  # bytes that are read from end to end where a sample would do
LONGEST_LINE = 1 << 20
MOST_NAMES = 64
MOST_KEPT = 16 << 20  # bytes of sums: of the files that were looked at last

Line = dict[str, Any]
Told = tuple[int, Mapping[str, Any]]  # a step, and what a line says of it


class Reading:
    """One file, in at most so many columns of steps.

    With `places`, of what has grown by much only lines at so many places are read, for their means.
    """

    def __init__(
        self, path: Path, told: Callable[[Line], Told | None], columns: int, places: int = 0
    ) -> None:
        self.told, self.most, self.places = told, columns, places
        self.added = AddedLines(path, piece=PIECE)
        self.forget()

    def forget(self) -> None:
        self.anew = self.added.anew
        self.points: dict[str, Points] = {}
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
        return sum(each.size for each in self.points.values())

    def look(self) -> None:
        """Read what is new; a file that was cut off or written anew is read from its beginning."""
        if self.places and self.added.behind() > WHOLE:
            self.feed(self.sampled())
            self.added.skip()
        while lines := self.added.read():
            self.feed(lines)

    def sampled(self) -> Iterator[Line]:
        """Yield lines from places that lie evenly in what is new."""
        begin = self.added.at
        try:
            with files.open_plain(self.added.path) as file:
                new = os.fstat(file.fileno()).st_size - begin
                # The last one soon: from then on it is known how many steps a column has.
                for place in (0, self.places - 1, *range(1, self.places - 1)):
                    file.seek(begin + new * place // self.places)
                    if place:
                        file.readline(LONGEST_LINE)  # the rest of a line
                    if (line := parsed(file.readline(LONGEST_LINE))) is not None:
                        yield line
        except OSError:  # it has gone meanwhile
            return

    def feed(self, lines: Iterable[Line]) -> None:
        if self.anew != self.added.anew:
            self.forget()
        waiting: dict[str, list[float]] = {}  # of the column that is being read
        here, last = -1, 0
        for line in lines:
            if (told := self.told(line)) is None:
                continue
            step, values = told
            if step >> self.shift != here:
                self.settle(waiting, here, last)
                here, last = self.column_of(step), step
            last = max(last, step)
            for name, value in values.items():
                if type(value) is float or type(value) is int:
                    if name in waiting:
                        waiting[name].append(value)
                    elif (own := shortened(name)) in self.points or (len(self.points) < MOST_NAMES):
                        self.points.setdefault(own, Points(ranges=not self.places))
                        waiting[name] = [value]
        self.settle(waiting, here, last)

    def settle(self, waiting: dict[str, list[float]], column: int, step: int) -> None:
        """Make points of the values that wait; a file may come back to a column later."""
        for name, values in waiting.items():
            if values:
                self.points[shortened(name)].add(column, step, values)
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
            self.points = {name: each.halved(more) for name, each in self.points.items()}
        self.columns = first >> more, last >> more
        return at >> more


class Kept:
    """The readings of the files that were looked at last, as many as there is room for."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most = most
        self.readings: OrderedDict[Hashable, Reading] = OrderedDict()
        self.lock = threading.Lock()  # of the two maps; files have the lock of their directory
        self.in_use: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()

    @contextlib.contextmanager
    def alone(self, directory: Path) -> Iterator[None]:
        """Be the only one that reads these files: two pages may show the same experiment."""
        with self.lock:
            lock = self.in_use.setdefault(directory, threading.Lock())
        with lock:
            yield

    def look(self, key: Hashable, made: Callable[[], Reading]) -> Reading:
        """Return the reading of a file, with what is new in it."""
        with self.lock:
            reading = self.readings.pop(key) if key in self.readings else made()
            self.readings[key] = reading
        reading.look()
        return reading

    def make_room(self) -> None:
        """Forget those that nobody has looked at for the longest."""
        with self.lock:
            size = sum(each.size for each in self.readings.values())
            while size > self.most:
                size -= self.readings.popitem(last=False)[1].size


KEPT = Kept()
