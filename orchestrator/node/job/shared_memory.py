"""Removes the shared memory that the killed processes of a job have left in /dev/shm.

What is mapped, shared and writable, by a process that is about to be killed is noted, if it was
made after the first of these processes began: a data set that lay there before is not the job's.
Once no process maps it, it is removed. The rest is reported.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator

from orchestrator.node.job import processes
from orchestrator.node.job.processes import Process

DIRECTORY = b"/dev/shm/"
# Of /proc/PID/maps: addresses, rights, offset, device, inode, path.
MAPPING = re.compile(rb"^\S+ (\S{4}) \S+ (\w+):(\w+) (\d+) +(/dev/shm/.*)$", re.MULTILINE)
SHARED = b"rw-s"

Key = tuple[int, int]  # device and inode


class Segments:
    """Shared memory of the processes of one job."""

    def __init__(self) -> None:
        self.noted: dict[Key, str] = {}
        self.since = float("inf")  # Unix time at which the first of the processes began

    def note(self, killed: Iterable[Process]) -> None:
        """Note what these processes map; they are stopped, or about to be killed."""
        killed = list(killed)
        self.since = min([self.since, *map(processes.began, killed)])
        for process in killed:
            owner = processes.owner_of(process.pid)
            for key, path in mapped(processes.contents(f"/proc/{process.pid}/maps"), SHARED):
                status = status_of(path, key)
                if status and status.st_uid == owner and status.st_ctime >= self.since:
                    self.noted[key] = path

    def remove(self) -> tuple[str, ...]:
        """Remove what no process maps any more, if it is this user's; return the rest."""
        there = {key: path for key, path in self.noted.items() if status_of(path, key)}
        used, hidden = in_use(there) if there else (set(), False)
        for key, path in there.items():
            status = status_of(path, key)
            own = status is not None and status.st_uid == os.getuid()
            # A process that may not be looked into could map what others may open.
            private = status is not None and not (hidden and status.st_mode & 0o077)
            if own and private and key not in used:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        return tuple(sorted(path for key, path in there.items() if status_of(path, key)))


def mapped(maps: bytes, rights: bytes = b"") -> Iterator[tuple[Key, str]]:
    """Yield what is mapped below /dev/shm, in any way or with these rights."""
    if DIRECTORY in maps:
        for its_rights, major, minor, inode, path in MAPPING.findall(maps):
            if rights in (b"", its_rights):
                device = os.makedev(int(major, 16), int(minor, 16))
                yield (device, int(inode)), os.fsdecode(path)


def status_of(path: str, key: Key) -> os.stat_result | None:
    """Return the status of a regular file that still has this path."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    same = (status.st_dev, status.st_ino) == key and stat.S_ISREG(status.st_mode)
    return status if same else None


def in_use(wanted: Iterable[Key]) -> tuple[set[Key], bool]:
    """Return which of these a process maps, and whether some process may not be looked into."""
    used: set[Key] = set()
    hidden = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                used |= {key for key, _ in mapped(file.read())}
        except PermissionError:
            hidden = True
        except OSError:
            continue
    return used & set(wanted), hidden
