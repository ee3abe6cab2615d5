"""Intervals of time: (start, end), sorted and without overlaps once they are merged."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[float, float]]

MANY = 1 << 16  # intervals that wait to be merged: what a long trace costs in memory


class Merged:
    """Intervals that come one by one, and are merged now and then.

    Kernels of one stream never touch, so merging may win nothing: the next one comes when there are
    twice as many. At each one more, a trace of 67,000 kernels was not read in five minutes.
    """

    def __init__(self) -> None:
        self.intervals: Intervals = []
        self.enough = MANY

    def add(self, start: float, end: float) -> None:
        self.intervals.append((start, end))
        if len(self.intervals) >= self.enough:
            self.intervals = _merged(self.intervals)
            self.enough = max(MANY, 2 * len(self.intervals))


def merge(intervals: Iterable[tuple[float, float]]) -> Intervals:
    merged = Merged()
    for interval in intervals:
        merged.add(*interval)
    return _merged(merged.intervals)


def _merged(intervals: Intervals) -> Intervals:
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif start < end:
            merged.append((start, end))
    return merged


def intersect(first: Intervals, other: Intervals) -> Intervals:
    """Intersect two merged lists."""
    both: Intervals = []
    i = j = 0
    while i < len(first) and j < len(other):
        start, end = max(first[i][0], other[j][0]), min(first[i][1], other[j][1])
        if start < end:
            both.append((start, end))
        if first[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return both


def length(merged: Intervals) -> float:
    return sum(end - start for start, end in merged)
