"""Measures who uses this machine's processors: two looks at /proc, a quarter of a second apart."""

from __future__ import annotations

import os
import pwd
import time
from typing import Any

from orchestrator.node.job import processes
from orchestrator.node.machine import sysfs

SECONDS = 0.25
LEAST = 0.05  # of a core: who uses less is not named, unless a job of ours is
MOST = 20  # users
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def load(seconds: float = SECONDS) -> dict[str, Any]:
    """Return the cores that each user's processes use now, the greatest first."""
    before, began = processes.everyone(), time.monotonic()
    time.sleep(seconds)
    after, took = processes.everyone(), time.monotonic() - began
    by_user: dict[tuple[str, str], dict[str, Any]] = {}
    boot = boot_time()
    for pid, now in after.items():
        was = before.get(pid)
        earlier = was.ticks if was and was.started == now.started else 0
        used = (now.ticks - earlier) / TICKS / took
        whose = owner(pid) if used >= LEAST / 4 or is_own(pid) else None
        if whose is None or pid == os.getpid():
            continue
        known = by_user.setdefault(
            (whose["user"], whose["job"]),
            {
                **whose,
                **{"cores": 0.0, "memory": 0, "processes": 0, "most": -1.0, "since": time.time()},
            },
        )
        known["cores"] += used
        known["memory"] += now.pages * PAGE
        known["processes"] += 1
        began_at = boot + now.started / TICKS
        if used > known["most"]:
            known.update(most=used, name=now.name, pid=pid)
            known["since"] = began_at if not whose["job"] else known["since"]
        if whose["job"]:
            known["since"] = min(known["since"], max(began_at, given_to_job(pid)))
    users = sorted(by_user.values(), key=lambda known: -known["cores"])
    named = [known for known in users if known["cores"] >= LEAST or known["job"]][:MOST]
    for known in named:
        del known["most"]
    cores = sum(known["cores"] for known in users)
    cpus = len(os.sched_getaffinity(0))
    return {"cores": cores, "users": named, "cpus": cpus, **memory(), **traffic()}


def memory() -> dict[str, int]:
    """Return the machine's memory in bytes, as the kernel tells it."""
    fields = sysfs.meminfo()
    return {
        "memory": fields.get("MemTotal", 0),
        "available": fields.get("MemAvailable", 0),
        "swapped": fields.get("SwapTotal", 0) - fields.get("SwapFree", 0),
    }


def traffic() -> dict[str, float]:
    """Count the bytes over all networks; what goes through a bridge or bond counts on its ports."""
    counts = sysfs.network_bytes().values()
    received, sent = (sum(count[way] for count in counts) for way in (0, 1))
    return {"received": received, "sent": sent, "at": time.monotonic()}


def owner(pid: int) -> dict[str, str] | None:
    """Say whose process it is, and of which job of ours, as far as we may look."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:  # it has ended, or lives in another container
        return None
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    tags = dict(entry.partition(b"=")[::2] for entry in processes.environment(pid))
    return {"user": user, "job": os.fsdecode(tags.get(b"ORCHESTRATOR_JOB", b""))}


def given_to_job(pid: int) -> float:
    """Return when a process's job came to this node: one that waited warm is older than its job."""
    tags = dict(entry.partition(b"=")[::2] for entry in processes.environment(pid))
    try:
        return os.stat(os.path.join(tags[b"ORCHESTRATOR_RUN"], b"spec.json")).st_mtime
    except (KeyError, OSError):
        return 0.0


def is_own(pid: int) -> bool:
    """Tell whether a process is this login's: its jobs are named also while they wait."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


def started(pid: int) -> float | None:
    """Return when a process began, in Unix seconds."""
    process = processes.look(pid)
    if process is None:
        return None
    return boot_time() + process.started / TICKS


def boot_time() -> float:
    """Return when the machine was started, in Unix seconds."""
    return time.time() - float(sysfs.text("/proc/uptime").split()[0])
