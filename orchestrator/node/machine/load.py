"""Measures who uses this machine's processors: two looks at /proc, a quarter of a second apart."""

from __future__ import annotations

import os
import pwd
import time
from typing import Any

from orchestrator.node.job import processes
from orchestrator.node.job.processes import Process
from orchestrator.node.job.run_directory import home
from orchestrator.node.machine import sysfs
from orchestrator.protocol.facts import Load, User

SECONDS = 0.25
LEAST = 0.05  # of a core: who uses less is not named, unless a job of ours is
MOST = 20  # users
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def load(seconds: float = SECONDS) -> Load:
    """Return the cores that each user's processes use now, the greatest first."""
    before, busy_before, began = processes.everyone(), busy_ticks(), time.monotonic()
    time.sleep(seconds)
    after, busy_after, took = processes.everyone(), busy_ticks(), time.monotonic() - began
    users: dict[tuple[str, str], User] = {}
    busiest: dict[tuple[str, str], float] = {}  # its cores
    for pid, now in after.items():
        was = before.get(pid)
        used = (now.ticks - (was.ticks if was and was.key == now.key else 0)) / TICKS / took
        whose = owner(pid) if used >= LEAST / 4 or is_ours(pid) else None
        if whose is None or pid == os.getpid():
            continue
        key = whose["user"], whose["job"]
        user = users.get(key) or User(**NOTHING, **whose, pid=pid, since=time.time())
        if used > busiest.get(key, -1.0):
            busiest[key] = used
            user = user.replace(name=now.name, pid=pid)
            user = user if user.job else user.replace(since=began_at(now))
        if user.job:
            user = user.replace(since=min(user.since, began_at(now)))
        users[key] = user.replace(
            cores=user.cores + used,
            memory=user.memory + now.pages * PAGE,
            processes=user.processes + 1,
        )
    listed = sorted(users.values(), key=lambda user: -user.cores)
    named = [user for user in listed if user.cores >= LEAST or user.job][:MOST]
    cores, cpus = sum(user.cores for user in listed), len(os.sched_getaffinity(0))
    unseen = max(0.0, (busy_after - busy_before) / TICKS / took - cores)
    users_named = tuple(named)
    more = {**memory(), **space(), **traffic()}
    return Load(cores + unseen, users_named, cpus, unseen=unseen, **more)


NOTHING: dict[str, Any] = {"name": "", "cores": 0.0, "memory": 0, "processes": 0}


def busy_ticks() -> int:
    """Return the time that programs have had on this login's processors, whoever sees them."""
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = (line.split() for line in sysfs.text("/proc/stat", 1 << 20).splitlines())
    return sum(sum(map(int, words[1:4])) for words in lines if words and words[0] in ours)


def memory() -> dict[str, int]:
    """Return the machine's memory in bytes, as the kernel tells it."""
    fields = sysfs.meminfo()
    return {
        "memory": fields.get("MemTotal", 0),
        "available": fields.get("MemAvailable", 0),
        "swapped": fields.get("SwapTotal", 0) - fields.get("SwapFree", 0),
    }


def space() -> dict[str, int]:
    """Return the size of the file system where jobs have their directories, and what is free."""
    try:
        status = os.statvfs(home())
    except OSError:  # no job was there yet
        return {}
    unit = status.f_frsize
    return {"disk": status.f_blocks * unit, "disk_free": status.f_bavail * unit}


def traffic() -> dict[str, Any]:
    """Count the bytes over all networks; what goes through a bridge or bond counts on its ports."""
    counts = sysfs.network_bytes().values()
    received, sent = (sum(count[way] for count in counts) for way in (0, 1))
    return {"received": received, "sent": sent, "at": time.monotonic()}


def owner(pid: int) -> dict[str, Any] | None:
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


def is_ours(pid: int) -> bool:
    """Return True for a process of this login: its jobs are named also while they wait."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


def started(pid: int) -> float | None:
    """Return when a process began, in Unix seconds."""
    process = processes.find(pid)
    return None if process is None else began_at(process)


def began_at(process: Process) -> float:
    return boot_time() + process.started / TICKS


def boot_time() -> float:
    """Return when the machine was started, in Unix seconds."""
    return time.time() - float(sysfs.text("/proc/uptime").split()[0])
