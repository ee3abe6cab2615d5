"""Describes the user's command that runs on a node before its first rank, or after its last."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import NamedTuple


class NodeCommand(NamedTuple):
    """A prolog or an epilog that runs."""

    name: str
    process: subprocess.Popen[bytes]
    deadline: float  # monotonic: it is killed then
    limit: float  # the seconds that it may take
    before: bytes  # what torchrun had said last

    def failure(self, code: int) -> str:
        """Say how it failed, in words after its name; nothing where it did not."""
        if code == -signal.SIGKILL and time.monotonic() >= self.deadline:
            return f"did not end within {self.limit:g} s"
        if code < 0:
            return f"was killed by signal {-code}"
        return f"ended with exit code {code}" if code else ""
