"""Measures the file systems of a job: their space, kind and rights."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence

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


class Disks:
    """The file systems that hold these paths. One that hangs stops the sampler, and no job."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.points: dict[str, str] = {}  # mount point -> one of the paths
        for path in filter(os.path.isdir, paths):
            self.points.setdefault(disk(path).mounted, path)

    def sample(self) -> dict[str, list[int]]:
        """Return mount point -> (free, total) bytes."""
        sizes = {}
        for point, path in self.points.items():
            with contextlib.suppress(OSError):
                status = os.statvfs(path)
                sizes[point] = [n * status.f_frsize for n in (status.f_bavail, status.f_blocks)]
        return sizes


def paths_of(workdir: str, experiment: str) -> list[str]:
    """Return what a job writes to: its outputs, its directory, /tmp and shared memory."""
    wanted = [experiment, workdir, "/tmp", SHM]
    return [path for path in dict.fromkeys(wanted) if os.path.isabs(path)]
