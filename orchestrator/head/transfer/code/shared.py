"""A file by which nodes see that they share the head's directory."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from orchestrator.common import interrupt
from orchestrator.head.transfer.code.listing import OURS

MARKER = os.fsdecode(OURS) + "marker-"


@contextlib.contextmanager
def marker(directory: Path) -> Iterator[str]:
    """Write a file that no other machine has, for as long as the nodes look for it.

    Where none can be written its name is empty: then no node counts as one that shares the disk.
    """
    path = directory / f"{MARKER}{secrets.token_hex(8)}"
    try:
        path.touch(0o600, exist_ok=False)
    except OSError:
        yield ""
        return

    def remove() -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    forget = interrupt.before_exit(remove)  # Ctrl-C while nodes are reached leaves at once
    try:
        yield str(path)
    finally:
        remove()
        forget()
