"""What a job's ranks left on a node that does not share the head's disk. Called by the link."""

from __future__ import annotations

import base64
import os
import stat
from typing import Any

from orchestrator.node.job.run_directory import RunDir

CHUNK = 1 << 19


def place(run: RunDir) -> str:
    """The node's own outputs; a job on a shared disk has none (see link.start)."""
    return os.path.join(run.path, "experiment", "outputs")


def listing(run: RunDir) -> list[dict[str, Any]]:
    """Every regular file; links are not followed. Checkpoints belong to the node."""
    found = []
    root = place(run)
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith("."))
        if directory == root:
            names[:] = [name for name in names if name != "checkpoints"]
        for name in sorted(files):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and not name.startswith("."):
                found.append({"path": os.path.relpath(path, root), "size": status.st_size})
    return found


def piece(run: RunDir, path: str, offset: int) -> str:
    """Some bytes of one of the listed files, in base64. The caller has seen that it is listed."""
    fd = os.open(os.path.join(place(run), path), os.O_RDONLY | os.O_NOFOLLOW)
    try:
        return base64.b64encode(os.pread(fd, CHUNK, offset)).decode("ascii")
    finally:
        os.close(fd)
