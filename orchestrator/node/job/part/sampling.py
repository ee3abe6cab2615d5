"""Starts the process that samples this machine (node/machine/sampler.py), and ends it with the job.

The supervisor only starts and ends it, and copies its messages into the log. A disk or a driver
that hangs then blocks only the sampler, which no other process waits for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from orchestrator.node.job import processes
from orchestrator.node.job.ranks.agent_start import PR_SET_PDEATHSIG, prctl
from orchestrator.node.job.run_directory import RunDir

if TYPE_CHECKING:
    import subprocess

# Sampling must not slow down the start, and a shorter job has nothing to show.
AFTER_SECONDS = 2.0
END_SECONDS = 1.0
LIBRARY = os.path.abspath(__file__).rsplit(os.sep, 5)[0]
START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1));"
    " from orchestrator.node.main import main; main()"
)


class SamplerProcess:
    """The sampler's process, which runs from some seconds after the job's start until its end."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.due = time.monotonic() + AFTER_SECONDS
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def wait(self) -> float:
        """Return the seconds until the sampler must be started."""
        return max(0.0, self.due - time.monotonic())

    def start(self) -> int | None:
        """Start the sampler if it is due; return the descriptor of its messages, or None."""
        if self.wait:
            return None
        self.due = float("inf")
        try:
            reading, writing = os.pipe()
        # No file descriptor is left.
        except OSError:
            return None
        os.set_blocking(reading, False)
        # Imported this late, so that it does not slow down the start.
        import subprocess

        # If no process can be started, the job goes on without samples.
        with contextlib.suppress(OSError):
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *processes.OPTIONS,
                    "-c",
                    START,
                    LIBRARY,
                    "sample",
                    *self.run.words,
                ],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=subprocess.DEVNULL,
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        os.close(writing)
        return reading

    def end(self) -> None:
        """Kill the sampler: all its lines are whole. One that hangs in the kernel is left."""
        self.due = float("inf")
        if self.process is not None:
            import subprocess

            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
