"""Reads what this machine lets a login have: processes' limits, memory."""

from __future__ import annotations

import re
import resource

from orchestrator.node.facts import sysfs
from orchestrator.protocol.facts import Limits

KINDS = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}


def limits() -> Limits:
    """Return the limits of this login, and so of its ranks."""
    return Limits(**{name: resource.getrlimit(kind) for name, kind in KINDS.items()})


def memory_kb(root: str = "") -> tuple[int, int]:
    """Return (total, available)."""
    text = sysfs.text(f"{root}/proc/meminfo")
    sizes = dict(re.findall(r"^(MemTotal|MemAvailable): +(\d+) kB", text, re.MULTILINE))
    return int(sizes.get("MemTotal", 0)), int(sizes.get("MemAvailable", 0))
