"""Reads the newest metrics of a rank from the end of its file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from orchestrator import files

LOOKS_BACK = 1 << 16  # bytes


def last_metrics(experiment: Path, rank: int = 0) -> dict[str, Any]:
    """Return the last whole line that a rank wrote, which nobody has checked; empty if none."""
    path = experiment / "outputs" / f"rank_{rank:02d}_metrics.jsonl"
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
