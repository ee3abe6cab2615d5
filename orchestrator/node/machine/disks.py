"""Measures the file systems of a job: their space, kind and rights."""

from __future__ import annotations

import os

from orchestrator.protocol.facts import Disk

SHM = "/dev/shm"


def disk_of(path: str) -> Disk:
    """Return the file system of a path, or of its first parent that exists."""
    inside = os.path.realpath(path)
    while not os.path.isdir(inside):
        inside = os.path.dirname(inside)
    status = os.statvfs(inside)
    read_only = bool(status.f_flag & os.ST_RDONLY)
    return Disk(
        path=path,
        total=status.f_blocks * status.f_frsize,
        free=status.f_bavail * status.f_frsize,
        inodes=status.f_files,
        inodes_free=status.f_favail,
        mounted=mount_point(inside),
        writable=not read_only and os.access(inside, os.W_OK),
    )


def shared_memory(path: str = SHM) -> Disk | None:
    """Return the shared memory file system, or None if there is none."""
    return disk_of(path) if os.path.isdir(path) else None


def mount_point(path: str) -> str:
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def disk_space(path: str) -> list[int]:
    """Return (free, total) bytes of a file system; empty if they are unknown."""
    try:
        status = os.statvfs(path)
    except OSError:
        return []
    return [blocks * status.f_frsize for blocks in (status.f_bavail, status.f_blocks)]
