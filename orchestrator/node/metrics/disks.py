"""Measures the room on the disks of a job, in a thread: a network disk may never answer."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.node.facts.disks import disk

SHM = "/dev/shm"
SLOW = 30.0  # seconds after which a disk that does not answer is said to be stuck


@dataclass
class Look:
    """The path that the thread looks at, and since when."""

    path: str = ""
    since: float = 0.0


class Disks:
    """The file systems that hold these paths, as they were when they last answered."""

    def __init__(self, paths: Sequence[str], seconds: float) -> None:
        self.paths, self.seconds = paths, seconds
        self.points: dict[str, str] = {}  # mount point -> one of the paths
        self.known: dict[str, list[int]] = {}
        self.at = Look()
        threading.Thread(target=self.watch, daemon=True, name="disks").start()

    def watch(self) -> None:
        for path in self.paths:
            with self.looking(path), contextlib.suppress(OSError):
                if os.path.isdir(path):
                    self.points.setdefault(disk(path).mounted, path)
        while True:
            known = {}
            for point, path in self.points.items():
                with self.looking(path), contextlib.suppress(OSError):
                    status = os.statvfs(path)
                    sizes = status.f_bavail, status.f_blocks
                    known[point] = [count * status.f_frsize for count in sizes]
            self.known = known
            time.sleep(self.seconds)

    @contextlib.contextmanager
    def looking(self, path: str) -> Iterator[None]:
        self.at = Look(path, time.monotonic())
        yield
        self.at = Look()

    @property
    def stuck(self) -> str:
        """Return the path that has not answered for long, or nothing."""
        at = self.at
        return at.path if at.path and time.monotonic() - at.since > SLOW else ""

    def look(self) -> dict[str, list[int]]:
        """Return mount point -> (free, total) bytes; of one that is stuck, what it was."""
        return self.known


def paths_of(workdir: str, experiment: str) -> list[str]:
    """Return what a job writes to: its outputs, its directory, /tmp and shared memory."""
    wanted = [experiment, workdir, "/tmp", SHM]
    return [path for path in dict.fromkeys(wanted) if os.path.isabs(path)]
