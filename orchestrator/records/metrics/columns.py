"""Sums of one metric over columns of steps: as many as a screen has room for. Pure.

A column has 2**n steps, and where there are too many columns, each two become one. So a file that
is read in pieces, as it grows, gives the same as when it is read at once.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.records.metrics.lines import LARGEST

NONE: array[Any] = array("d")
OBJECT_BYTES = 500  # of the arrays themselves
# Of the arrays in their order: two columns become one.
JOINED: tuple[Callable[..., Any], ...] = (operator.add, operator.add, max, min, max)


class Columns:
    """The sums of each column from `base` on; columns without a value have the count 0.

    Without ranges only their means are known: a map of many ranks has very many columns.
    """

    __slots__ = ("base", "counts", "highs", "lows", "ranges", "steps", "totals")

    def __init__(self, *, ranges: bool = True) -> None:
        self.base, self.ranges = 0, ranges
        self.counts, self.totals = array("q"), array("d")
        self.steps, self.lows, self.highs = NONE, NONE, NONE
        if ranges:
            self.steps = array("q")  # the last one of a column that has a value
            self.lows, self.highs = array("d"), array("d")

    def add(self, column: int, step: int, values: Sequence[float]) -> None:
        """Add values up to this step, many at once: of a million lines each is taken in C."""
        known = [value for value in values if abs(value) < LARGEST]  # NaN is not either
        if not known:
            return
        at = column - self.base if self.counts else 0
        if not 0 <= at < len(self.counts):
            at = self._place(column)
        self.counts[at] += len(known)
        self.totals[at] += math.fsum(known)
        if self.ranges:
            self.steps[at] = max(self.steps[at], step)
            self.lows[at] = min(self.lows[at], *known)
            self.highs[at] = max(self.highs[at], *known)

    @property
    def size(self) -> int:
        """Return the bytes that it takes, nearly."""
        return OBJECT_BYTES + len(self.counts) * 8 * len(self._arrays())

    def halved(self, times: int) -> Columns:
        """Return the same in columns of 2**times as many steps."""
        columns = self
        for _ in range(times):
            columns = columns._pairs()
        return columns

    def means(self, first: int, last: int) -> list[float | None]:
        """Return the mean of each column from the first to the last, which no value is before."""
        means: list[float | None] = [None] * (last - first + 1)
        for at, (total, count) in enumerate(zip(self.totals, self.counts, strict=True), self.base):
            if count:
                means[at - first] = total / count
        return means

    def _pairs(self) -> Columns:
        if self.base % 2 and self.counts:
            self._extend_before(1)
        if len(self.counts) % 2:
            self._extend(1)
        half = Columns(ranges=self.ranges)
        half.base = self.base // 2
        for (into, _), (of, _), join in zip(half._arrays(), self._arrays(), JOINED, strict=False):
            into.extend(map(join, of[::2], of[1::2]))
        return half

    def _place(self, column: int) -> int:
        """Make room for a column, which may be before the first: a file may begin anew."""
        if not self.counts:
            self.base = column
        if column < self.base:
            self._extend_before(self.base - column)
        else:
            self._extend(column - self.base - len(self.counts) + 1)
        return column - self.base

    def _extend(self, count: int) -> None:
        for values, nothing in self._arrays():
            values.extend(array(values.typecode, [nothing]) * count)

    def _extend_before(self, count: int) -> None:
        self.base -= count
        for values, nothing in self._arrays():
            values[:0] = array(values.typecode, [nothing]) * count

    def _arrays(self) -> tuple[tuple[array[Any], float], ...]:
        """Return each array, and what stands in a column without values."""
        sums = (self.counts, 0), (self.totals, 0.0)
        if not self.ranges:
            return sums
        return (*sums, (self.steps, 0), (self.lows, math.inf), (self.highs, -math.inf))
