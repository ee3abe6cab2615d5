"""Evidence about a rank's end that its exit code does not show."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

CGROUPS = "/sys/fs/cgroup"
SHM = "/dev/shm"
FULL_BYTES = 1 << 20  # with less left, the next tensor of a DataLoader does not fit
WORDS_CHARACTERS = 4000  # of a rank's last ones, before a dump of its stacks and of that dump


class Evidence:
    """Counters as they were when the job began, to compare with their present values."""

    def __init__(self) -> None:
        self.before = oom_kills()

    def now(self) -> dict[str, Any]:
        kills = [count - self.before.get(name, 0) for name, count in oom_kills().items()]
        return {"oom_kills": max(kills, default=0), "shm_full": is_full(SHM)}


def oom_kills() -> dict[str, int]:
    """Return file -> how many processes the kernel's out-of-memory killer ended, by its count.

    /proc/vmstat counts for the whole machine; where it does not (before Linux 4.13, or hidden from
    a container) the control group's own count is there.
    """
    files = ["/proc/vmstat"]
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                files += [f"{CGROUPS}{path}/memory.events", f"{CGROUPS}/memory.events"]
            elif "memory" in controllers.split(","):
                files += [f"{CGROUPS}/memory{path}/memory.oom_control"]
                files += [f"{CGROUPS}/memory/memory.oom_control"]
    counts = {}
    for name in files:
        with contextlib.suppress(OSError), open(name, encoding="ascii") as file:
            counted = re.search(r"^oom_kill (\d+)$", file.read(), re.MULTILINE)
            if counted:
                counts[name] = int(counted.group(1))
    return counts


def is_full(path: str) -> bool:
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < FULL_BYTES


def last_words(output: bytes) -> str:
    """Return the last output before a dump of the stacks, and the dump's beginning."""
    text = output.decode("utf-8", "replace")
    start = text.rfind("Fatal Python error")
    if start < 0:
        return text[-WORDS_CHARACTERS:]
    return text[max(0, start - WORDS_CHARACTERS) : start + WORDS_CHARACTERS]
