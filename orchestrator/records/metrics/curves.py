"""Makes curves from metrics files that grow: a mean and a range for each point.

Each read covers only the new lines. Memory is bounded: sums are kept over columns of 2**n steps,
and pairs of columns are merged if there are too many. Lines may have any length and content: they
may be half written, or come from a user's own program.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.common.text import format_bytes
from orchestrator.records.metrics.lines import GrowingFile, finite_number
from orchestrator.records.metrics.trainers import Point, shorten_name

# The most points of a curve: a wide screen has room for as many.
POINTS = 1000
MOST_NAMES = 64
# The most bytes in memory at once.
PIECE_BYTES = 1 << 20
# The most files whose sums are kept.
MOST_FILES = 32
# The keys that locate a line. All others are measured values.
PLACE_OF_LINE = ("rank", "step")


@dataclass(frozen=True)
class Curve:
    """One metric over the steps. A point of several steps has their mean and range."""

    steps: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)


@dataclass
class Sums:
    """The lowest, highest and total value of one metric in one column of steps."""

    step: int
    low: float
    high: float
    total: float
    count: int = 1


Columns = dict[int, Sums]


class CurveSums:
    """The sums of metrics, in at most `most` columns of steps."""

    def __init__(self, most: int = POINTS) -> None:
        self.most = most
        self.forget()

    def forget(self) -> None:
        self.metrics: dict[str, Columns] = {}
        # A column has 2**shift steps.
        self.shift = 0
        self.known: set[int] = set()

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        self.known.add(step >> self.shift)
        while len(self.known) > self.most:
            self.shift += 1
            self.known = {at >> 1 for at in self.known}
            self.metrics = {name: halved(columns) for name, columns in self.metrics.items()}
        for name, value in values.items():
            short = shorten_name(name)
            if finite_number(value) is not None and (
                short in self.metrics or len(self.metrics) < MOST_NAMES
            ):
                columns = self.metrics.setdefault(short, {})
                add(columns, step >> self.shift, Sums(step, value, value, value))

    def curves(self, points: int) -> dict[str, Curve]:
        return {name: curve_of(columns, points) for name, columns in self.metrics.items()}


class FileSums(CurveSums):
    """The sums of one file."""

    def __init__(self, path: Path, most: int = POINTS) -> None:
        super().__init__(most)
        self.file = GrowingFile(path, piece=PIECE_BYTES)
        self.replaced = 0

    def read(self) -> None:
        """Read the new lines. A file that was truncated is read from its start."""
        while lines := self.file.read():
            if self.replaced != self.file.replaced:
                self.replaced = self.file.replaced
                self.forget()
            for line in lines:
                if (step := Point(line).step) is not None:
                    self.add(step, {n: v for n, v in line.items() if n not in PLACE_OF_LINE})


def halved(columns: Columns) -> Columns:
    """Return the sums in columns of twice as many steps."""
    joined: Columns = {}
    for at, sums in columns.items():
        add(joined, at >> 1, sums)
    return joined


def add(columns: Columns, at: int, new: Sums) -> None:
    """Add sums to a column, which is created if necessary."""
    old = columns.get(at)
    if old is not None:
        low, high = min(old.low, new.low), max(old.high, new.high)
        total, count = old.total + new.total, old.count + new.count
        new = Sums(max(old.step, new.step), low, high, total, count)
    columns[at] = new


def curve_of(columns: Columns, points: int) -> Curve:
    while len(columns) > points:
        columns = halved(columns)
    known = [columns[at] for at in sorted(columns)]
    return Curve(
        [sums.step for sums in known],
        [sums.total / sums.count for sums in known],
        [sums.low for sums in known],
        [sums.high for sums in known],
    )


# The sums of the files that were read last. A report reads each once, an open page repeatedly.
sums_of = functools.lru_cache(MOST_FILES)(FileSums)


def rank_curves(path: Path, points: int) -> dict[str, Curve]:
    """Return the curves in one rank's file by name, with at most `points` points each."""
    sums = sums_of(path)
    sums.read()
    return sums.curves(points)


# -- names of metrics -------------------------------------------------------------------------


# Words in a metric's name that imply which of its values is the best.
LEAST = {
    "loss",
    "err",
    "error",
    "ppl",
    "perplexity",
    "ms",
    "seconds",
    "wer",
    "cer",
    "fid",
    "mae",
    "mse",
    "rmse",
    "nll",
    "bpb",
}
MOST = {
    "acc",
    "acc1",
    "acc5",
    "accuracy",
    "f1",
    "auc",
    "iou",
    "miou",
    "map",
    "psnr",
    "ssim",
    "bleu",
    "rouge",
    "reward",
    "return",
    "score",
    "mfu",
    "recall",
    "precision",
    "top1",
    "top5",
}
WORDS = {
    "step_ms": "step time",
    "data_ms": "waiting for data",
    "forward_backward_ms": "forward and backward",
    "optimizer_ms": "optimizer",
    "exposed_comm_ms": "exposed communication",
    "tokens_per_s": "speed",
    "memory_peak_bytes": "peak memory",
    "memory_bytes": "memory now",
    "mfu": "MFU, against the vendor's peak",
    "mfu_measured": "MFU, against measured peak",
}
# Units by the end of a name.
UNITS = {
    **{"mfu": "ratio", "mfu_measured": "ratio"},
    **{"_ms": "ms", "seconds": "s", "_bytes": "bytes", "_per_s": "/s"},
}


def unit_of(name: str) -> str:
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


def better_direction(name: str) -> str:
    """Return "least" or "most" for a metric's best value by its name, or "" if unknown."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if words & LEAST:
        return "least"
    return "most" if words & MOST or name.endswith("_per_s") else ""


def count_in_thousands(value: float) -> str:
    """Return a count in a few characters: 415k, 1.2M."""
    return format_bytes(value).removesuffix("B").replace(" ", "")
