"""Lists and reads what a job's ranks wrote on a node that does not share the head's disk."""

from __future__ import annotations

import os
import stat

from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.messages import OutputFile

CHUNK = 1 << 19


def directory(run: RunDir) -> str:
    """Return the node's own outputs; a job on a shared disk has none (see Session.start)."""
    return os.path.join(run.path, "experiment", "outputs")


def has_checkpoints(run: RunDir) -> bool:
    path = os.path.join(directory(run), "checkpoints")
    return os.path.isdir(path) and bool(os.listdir(path))


def listing(run: RunDir) -> tuple[OutputFile, ...]:
    """Return every regular file; links are not followed. Checkpoints belong to the node."""
    listed = []
    root = directory(run)
    for parent, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith("."))
        if parent == root:
            names[:] = [name for name in names if name != "checkpoints"]
        for name in sorted(files):
            path = os.path.join(parent, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and not name.startswith("."):
                listed.append(OutputFile(path=os.path.relpath(path, root), size=status.st_size))
    return tuple(listed)


def piece(run: RunDir, path: str, offset: int) -> bytes:
    """Return some bytes of one of the listed files. The caller has seen that it is listed."""
    fd = os.open(os.path.join(directory(run), path), os.O_RDONLY | os.O_NOFOLLOW)
    try:
        return os.pread(fd, CHUNK, offset)
    finally:
        os.close(fd)
