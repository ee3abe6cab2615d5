"""Remembers which files of a directory are copies that were brought here, and how they looked.

The list lies in the directory itself, as that may outlive the job, and is this machine's alone, as
that may be on a disk that others see, too. A file that looks otherwise now was written here.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from typing import Any, NamedTuple

from orchestrator.common import files
from orchestrator.node.job.run_directory import machine

PREFIX = ".orchestrator-copies-"
LARGEST_BYTES = 64 << 20


class Stamp(NamedTuple):
    """The looks of a file or link, by which it is known again."""

    size: int
    changed: int  # nanoseconds
    target: str = ""  # of a link, whose size and time mean nothing


class Copy(NamedTuple):
    """A file that was brought, by which job and attempt, and from whom."""

    looks: tuple[Stamp, ...]  # several while it is replaced, the new one first
    by: str
    changed: int  # of the file that it is a copy of
    job: str


def stamp_of(status: os.stat_result, target: str = "") -> Stamp:
    if stat.S_ISLNK(status.st_mode):
        return Stamp(0, 0, target)
    return Stamp(status.st_size, status.st_mtime_ns)


class Copies:
    """The copies in one directory, by their paths below it."""

    def __init__(self, root: str) -> None:
        name = hashlib.sha256(machine().encode()).hexdigest()[:16]
        self.path = os.path.join(root, f"{PREFIX}{name}.json")
        self.known: dict[str, Copy] = {}
        try:
            with files.open_plain(self.path) as file:
                self.known = read(json.loads(file.read(LARGEST_BYTES)))
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            pass  # there is none; or, without a list that can be read, no file is a copy

    def of(self, path: str, stamp: Stamp) -> Copy | None:
        """Return what is known of a copy, if it still looks as it did when it was brought.

        One that was about to be replaced has no time of an origin: nothing is like it.
        """
        copy = self.known.get(path)
        if copy is None or stamp not in copy.looks:
            return None
        return copy if stamp == copy.looks[0] else copy._replace(changed=0)

    def before(self, path: str, job: str) -> Copy | None:
        """Return the copy that came last in this job, though it may look otherwise now."""
        copy = self.known.get(path)
        return copy if copy is not None and copy.job == job else None

    def expect(self, path: str, stamp: Stamp, by: str, job: str) -> None:
        """Note that a file is about to come; until it has, the one before it is known, too."""
        before = self.known.get(path)
        stamps = (stamp, *(before.looks if before else ()))
        self.known[path] = Copy(stamps, by, stamp.changed, job)

    def came(self, path: str, stamp: Stamp) -> None:
        self.known[path] = self.known[path]._replace(looks=(stamp,))

    def note(self, path: str, stamp: Stamp, by: str, changed: int, job: str) -> None:
        """Note that a file which is here already is a copy, though it did not come from there."""
        self.known[path] = Copy((stamp,), by, changed, job)

    def forget(self, path: str) -> None:
        self.known.pop(path, None)

    def write(self) -> None:
        if self.known or os.path.lexists(self.path):
            files.replace(self.path, json.dumps(self.known))


def read(data: Any) -> dict[str, Copy]:
    known = {}
    for path, (stamps, by, changed, job) in data.items():
        known_stamps = tuple(
            Stamp(int(size), int(time), str(target)) for size, time, target in stamps
        )
        known[str(path)] = Copy(known_stamps, str(by), int(changed), str(job))
    return known
