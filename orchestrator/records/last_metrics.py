"""Reads the newest metrics from the end of a file."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.records.added_lines import parsed

LOOKS_BACK = 1 << 16  # bytes
MOST_LINES = 16
OF_A_STEP = "step_ms"  # in the line of a step
LARGEST = 1e300  # sums of such values are still finite
LARGEST_STEP = 1 << 53  # whole numbers up to it are floats, too
LONGEST_NAME = 100  # letters


def last_values(path: Path | None) -> dict[str, Any]:
    """Return what a file of metrics says last of each value, which nobody has checked.

    The line that ends an epoch has only what the epoch came to: the loss and the speed stand in the
    line of a step before it.
    """
    if path is None:
        return {}
    try:
        with files.open_plain(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOOKS_BACK))
            lines = file.read(LOOKS_BACK).split(b"\n")
    except OSError:  # it has none, or they stay on the node
        return {}
    known: dict[str, Any] = {}
    found = (line for raw in reversed(lines) if (line := parsed(raw)) is not None)
    for line in itertools.islice(found, MOST_LINES):
        known = {**line, **known}
        if OF_A_STEP in line:
            break
    return known


def shortened(name: str) -> str:
    """Return a metric's name as tables and charts show it: a program may give any."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 40]}...{name[-37:]}"


def loss_is_lost(line: Mapping[str, Any]) -> bool:
    """Tell whether the loss of a line is NaN or infinite, which JSON has as null."""
    value = line.get("loss", 0.0)
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def step_of(line: Mapping[str, Any]) -> int | None:
    """Return the step that a line is of; None where it has none that can be counted."""
    step = number(line, "step")
    if step is None or not 0 <= step < LARGEST_STEP or step != int(step):
        return None
    return int(step)


def number(line: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number that a line has; None where it has none."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < LARGEST else None
