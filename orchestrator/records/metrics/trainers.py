"""Find and read what the Trainers of a job's program measure: a file for each Trainer and rank.

Most programs have one Trainer (or engine): rank_00_metrics.jsonl, rank_01_metrics.jsonl, ...
The second one's files are rank_00_metrics_2.jsonl, ... and so on. Of a program that has none of
them, the head writes files of the same form from what its ranks print, into a directory of its own.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.records.metrics.lines import number, parsed

FILE = re.compile(r"rank_([0-9]{2,9})_metrics(?:_([0-9]{1,4}))?\.jsonl")
END_BYTES = 1 << 16  # of a file, in which its last values are sought
END_LINES = 16
OF_A_STEP = "step_ms"  # in the line of a step
TOKENS = "tokens"
UNIT, UNITS = "unit", (TOKENS, "samples", "targets")  # what `tokens` counts, where a line says it
LARGEST_STEP = 1 << 53  # whole numbers up to it are floats, too
LONGEST_NAME = 100  # letters

Files = dict[int, Path]  # rank -> its file


@dataclass(frozen=True)
class Point:
    """Holds what a rank said of one step: anything, so values are checked when read."""

    line: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """Return its step; None where it has none that can be counted."""
        step = self.number("step")
        if step is None or not 0 <= step < LARGEST_STEP or step != int(step):
            return None
        return int(step)

    @property
    def unit(self) -> str:
        """Name what `tokens` and `tokens_per_s` count."""
        unit = self.line.get(UNIT)
        return unit if unit in UNITS else TOKENS

    @property
    def loss_is_lost(self) -> bool:
        """Tell whether its loss is NaN or infinite, which JSON has as null."""
        value = self.line.get("loss", 0.0)
        return value is None or (isinstance(value, float) and not math.isfinite(value))

    def number(self, name: str) -> float | None:
        """Return a value that is a finite number; None where there is none."""
        return number(self.line.get(name))

    def numbers(self, most: int, without: tuple[str, ...]) -> dict[str, float]:
        """Return the numbers among the first so many values, by names that fit into a table."""
        names = (name for name in self.line if name not in without)
        pairs = ((name, self.number(name)) for name in itertools.islice(names, most))
        return {shortened(name): value for name, value in pairs if value is not None}


def last(path: Path | None) -> Point:
    """Return what a file says last of each value.

    The line that ends an epoch has only what the epoch came to: the loss and the speed stand in the
    line of a step before it.
    """
    if path is None:
        return Point()
    try:
        with files.open_plain(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
            raws = file.read(END_BYTES).split(b"\n")
    except OSError:  # it has none, or they stay on the node
        return Point()
    known: dict[str, Any] = {}
    lines = (line for raw in reversed(raws) if (line := parsed(raw)) is not None)
    for line in itertools.islice(lines, END_LINES):
        known = {**line, **known}
        if OF_A_STEP in line:
            break
    return Point(known)


def shortened(name: str) -> str:
    """Return a metric's name as tables and charts show it: a program may choose any."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 40]}...{name[-37:]}"


# -- the files --------------------------------------------------------------------------------


def file_name(rank: int, trainer: int = 1) -> str:
    """Return the name of the file in which a rank writes what a Trainer measures."""
    return f"rank_{rank:02d}_metrics{f'_{trainer}' if trainer > 1 else ''}.jsonl"


def of_name(name: str) -> tuple[int, int] | None:
    """Return the Trainer and the rank that a file's name tells; None for another file."""
    match = FILE.fullmatch(name)
    if match is None:
        return None
    trainer, rank = int(match[2] or 1), int(match[1])
    return (trainer, rank) if name == file_name(rank, trainer) else None


def printed(outputs: Path) -> Path:
    """Return the directory of what is read from the lines that ranks print."""
    return outputs.parent / "printed"


def every(outputs: Path) -> dict[int, Files]:
    """Find the files of all Trainers, or those made of what the ranks of a program print."""
    return measured(outputs) or measured(printed(outputs))


def measured(outputs: Path) -> dict[int, Files]:
    """Find the files of all Trainers, the first Trainer's first; a link is passed over."""
    found: dict[int, Files] = {}
    try:
        with os.scandir(outputs) as entries:
            for entry in entries:
                known = of_name(entry.name)
                if known is not None and entry.is_file(follow_symlinks=False):
                    found.setdefault(known[0], {})[known[1]] = Path(entry.path)
    except OSError:
        return {}
    return {trainer: dict(sorted(found[trainer].items())) for trainer in sorted(found)}


def newest(outputs: Path) -> tuple[int, Files]:
    """Return the Trainer that was made last, of those that have measured something."""
    found = every(outputs)
    for trainer, paths in reversed(found.items()):
        if last(paths[min(paths)]).line:
            return trainer, paths
    return 1, found.get(1, {})
