"""Measures the file systems of a job: their space, kind and rights; in a thread for sampling."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.node.machine import sysfs
from orchestrator.protocol.facts import Disk


def disk(path: str, root: str = "") -> Disk:
    """Measure the file system that holds a path; where the path is not there, its parent."""
    inside = os.path.realpath(path)
    while not os.path.isdir(inside):
        inside = os.path.dirname(inside)
    status = os.statvfs(inside)
    point, kind, source = mount(sysfs.text(f"{root}/proc/self/mountinfo", 1 << 20), inside)
    read_only = bool(status.f_flag & os.ST_RDONLY)
    return Disk(
        path=path,
        total=status.f_blocks * status.f_frsize,
        free=status.f_bavail * status.f_frsize,
        inodes=status.f_files,
        inodes_free=status.f_favail,
        mounted=point,
        filesystem=kind,
        source=source,
        writable=not read_only and os.access(inside, os.W_OK),
    )


def shared_memory(path: str = "/dev/shm", root: str = "") -> Disk | None:
    """Measure the shared memory; None where there is none."""
    return disk(path, root) if os.path.isdir(path) else None


def mount(mountinfo: str, path: str) -> tuple[str, str, str]:
    """Return (mount point, type, source) of the longest mount point that covers a path."""
    best = ("", "", "")
    for line in mountinfo.splitlines():
        fields, dash, rest = line.partition(" - ")
        before, after = fields.split(" "), rest.split(" ")
        if not dash or len(before) < 5 or len(after) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8) & 255), before[4])
        covers = path == point or path.startswith(point.rstrip("/") + "/")
        if covers and len(point) >= len(best[0]):  # of two at one place the later hides the other
            best = (point, after[0], after[1])
    return best


SHM = "/dev/shm"
SLOW_SECONDS = 30.0  # after which a disk that does not answer is said to be stuck


@dataclass
class AskedPath:
    """The path that the thread looks at, and since when."""

    path: str = ""
    since: float = 0.0


class Disks:
    """The file systems that hold these paths, as they were when they last answered."""

    def __init__(self, paths: Sequence[str], seconds: float) -> None:
        self.paths, self.seconds = paths, seconds
        self.points: dict[str, str] = {}  # mount point -> one of the paths
        self.known: dict[str, list[int]] = {}
        self.at = AskedPath()
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
        self.at = AskedPath(path, time.monotonic())
        yield
        self.at = AskedPath()

    @property
    def stuck(self) -> str:
        """Return the path that has not answered for long, or nothing."""
        at = self.at
        return at.path if at.path and time.monotonic() - at.since > SLOW_SECONDS else ""

    def sample(self) -> dict[str, list[int]]:
        """Return mount point -> (free, total) bytes; of one that is stuck, what it was."""
        return self.known


def paths_of(workdir: str, experiment: str) -> list[str]:
    """Return what a job writes to: its outputs, its directory, /tmp and shared memory."""
    wanted = [experiment, workdir, "/tmp", SHM]
    return [path for path in dict.fromkeys(wanted) if os.path.isabs(path)]
