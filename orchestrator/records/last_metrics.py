"""Reads the newest metrics from the end of a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator import files

LOOKS_BACK = 1 << 16  # bytes
LARGEST = 1e300  # sums of such values are still finite
LONGEST_NAME = 100  # letters


def last_line(path: Path | None) -> dict[str, Any]:
    """Return the last whole line of a file of metrics, which nobody has checked; empty if none."""
    if path is None:
        return {}
    try:
        with files.open_plain(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOOKS_BACK))
            lines = file.read(LOOKS_BACK).split(b"\n")
    except OSError:  # it has none, or they stay on the node
        return {}
    for line in reversed(lines):
        try:
            known = json.loads(line)
        except (ValueError, RecursionError):  # empty, or cut off by the end of the job
            continue
        if isinstance(known, dict):
            return known
    return {}


def shortened(name: str) -> str:
    """Return a metric's name as tables and charts show it: a program may give any."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 40]}...{name[-37:]}"


def number(line: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number that a line has; None where it has none."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < LARGEST else None
