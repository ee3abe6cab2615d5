"""Show how far long work is, on a line that is removed at the end; only on a terminal."""

from __future__ import annotations

import sys
import threading
import time

from orchestrator.common import text
from orchestrator.head.screen import output

PROGRESS_SECONDS = 0.2


class Progress:
    """Counts bytes, from any thread."""

    def __init__(self, what: str, size: int) -> None:
        self.what, self.size, self.done = what, size, 0
        self.lock = threading.Lock()  # transfers add from threads of their own
        self.tty = sys.stderr.isatty()
        self.next = time.monotonic() + PROGRESS_SECONDS
        self.dirty = False

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
            if self.tty and time.monotonic() > self.next:
                self.next = time.monotonic() + PROGRESS_SECONDS
                self.dirty = True
                output.status(f"{self.what}: {text.size(self.done)} of {text.size(self.size)}")

    def clear(self) -> None:
        if self.dirty:
            output.status("")
