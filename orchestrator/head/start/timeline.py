"""When each step of a launch was done, on the head; the nodes' own steps are events of theirs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.head.connect.reach import Reached

START_TIME = 19  # among the fields of /proc/self/stat after the name, see proc(5)


def begun() -> float:
    """Return when this process was started, or now where the kernel does not say."""
    now = time.time()
    try:
        status = Path("/proc/self/stat").read_bytes()
        ticks = int(status.rpartition(b")")[2].split()[START_TIME])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError):
        return now
    return now - max(0.0, since_boot - ticks / os.sysconf("SC_CLK_TCK"))


def to_json(times: Mapping[str, float], reached: Sequence[Reached]) -> dict[str, Any]:
    """Return the times for the manifest: Unix seconds by the head's clock."""
    return {**times, "nodes": [node.times for node in reached]}
