"""Finds and reads the metrics files of Trainers: one for each Trainer and rank.

Most programs have one Trainer (or engine): rank_00_metrics.jsonl, rank_01_metrics.jsonl, ...
A second one has the files rank_00_metrics_2.jsonl, ... and so on. For a program without a Trainer,
the head writes files of the same format from the output of its ranks, into a separate directory.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.records.metrics.lines import finite_number, last_lines, numbered_files

# The rank, and the number of a Trainer from the second on, as file_name() writes them.
FILE = re.compile(
    r"rank_([0-9]{2}|[1-9][0-9]{2,8})_metrics(?:_([2-9]|[1-9][0-9]{1,3}))?\.jsonl", re.ASCII
)
# The end of a file, which is searched for its last values.
END_BYTES = 1 << 16
END_LINES = 16
# Only the line of a step has this key.
OF_A_STEP = "step_ms"
TOKENS = "tokens"
# The key for the unit of `tokens`, and its values.
UNIT, UNITS = "unit", (TOKENS, "samples", "targets")
# Whole numbers up to this are exact as floats.
LARGEST_STEP = 1 << 53
LONGEST_NAME = 100  # characters

# Each rank's file.
Files = dict[int, Path]


@dataclass(frozen=True)
class Point:
    """A line of metrics of one rank and step. Values are checked when they are read."""

    line: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """Return its step, or None if it has no valid one."""
        step = self.number("step")
        if step is None or not 0 <= step < LARGEST_STEP or step != int(step):
            return None
        return int(step)

    @property
    def unit(self) -> str:
        """Return the unit of `tokens` and `tokens_per_s`."""
        unit = self.line.get(UNIT)
        return unit if unit in UNITS else TOKENS

    @property
    def loss_is_lost(self) -> bool:
        """Return True if its loss is NaN or infinite, which is null in JSON."""
        value = self.line.get("loss", 0.0)
        return value is None or (isinstance(value, float) and not math.isfinite(value))

    def number(self, name: str) -> float | None:
        """Return a value if it is a finite number, else None."""
        return finite_number(self.line.get(name))

    def numbers(self, most: int, without: tuple[str, ...]) -> dict[str, float]:
        """Return the numbers among the first `most` values, by shortened names."""
        names = (name for name in self.line if name not in without)
        pairs = ((name, self.number(name)) for name in itertools.islice(names, most))
        return {shorten_name(name): value for name, value in pairs if value is not None}


def read_last_values(path: Path | None) -> Point:
    """Return the last value of each metric in a file.

    The last line of an epoch has only totals. Loss and speed are in the line of a step before it.
    """
    if path is None:
        return Point()
    known: dict[str, Any] = {}
    for line in itertools.islice(last_lines(path, END_BYTES), END_LINES):
        known = {**line, **known}
        if OF_A_STEP in line:
            break
    return Point(known)


def shorten_name(name: str) -> str:
    """Return a metric's name, shortened for tables and charts: a program may choose any."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 40]}...{name[-37:]}"


# -- the files --------------------------------------------------------------------------------


def file_name(rank: int, trainer: int = 1) -> str:
    """Return the name of the file in which a rank writes the metrics of a Trainer."""
    return f"rank_{rank:02d}_metrics{f'_{trainer}' if trainer > 1 else ''}.jsonl"


def printed_metrics_directory(outputs: Path) -> Path:
    """Return the directory of the metrics that are read from ranks' output."""
    return outputs.parent / "printed"


def list_metrics_files(outputs: Path) -> dict[int, Files]:
    """Return the files of all Trainers in order."""
    found: dict[int, Files] = {}
    for rank, paths in numbered_files(outputs, FILE).items():
        for trainer, path in paths.items():
            found.setdefault(trainer, {})[rank] = path
    return dict(sorted(found.items()))


def newest_metrics_files(outputs: Path) -> Files:
    """Return the files of the newest Trainer that has measured something.

    Without a Trainer these are the files made from the ranks' output.
    """
    found = list_metrics_files(outputs) or list_metrics_files(printed_metrics_directory(outputs))
    for paths in reversed(found.values()):
        if read_last_values(paths[min(paths)]).line:
            return paths
    return found.get(1, {})


def file_of_first_rank(outputs: Path) -> Path | None:
    """Return the newest Trainer's file of its first rank, or None if there is none."""
    return next(iter(newest_metrics_files(outputs).values()), None)
