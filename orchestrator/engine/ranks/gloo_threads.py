"""Let gloo's threads finish before the interpreter is taken apart.

The thread that ran the last collective still holds its tensors for a moment, and needs the
interpreter to drop them. Before Python 3.14 a thread that asks for an interpreter which is ending
is unwound through gloo's frames: "terminate called without an active exception", exit code 134, at
the end of a training that went well. On a busy machine that moment is long.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

NAME = "pt_gloo_runloop"
PAUSE = 0.001  # seconds between two looks; a thread that waits for the interpreter gets it here
LOOKS = 3  # so many in a row without one that runs
LIMIT = 5.0


def finish() -> None:
    """Return when all of them sleep, or after the limit."""
    deadline = time.monotonic() + LIMIT
    asleep = 0
    while asleep < LOOKS and time.monotonic() < deadline:
        asleep = 0 if running() else asleep + 1
        time.sleep(PAUSE)


def running() -> bool:
    for directory in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = (directory / "stat").read_text().partition("(")[2].rpartition(")")
            if name == NAME and rest.split()[0] != "S":
                return True
    return False
