"""Starts the process that samples this machine (node/machine/sampler.py), and ends it with the job.

The supervisor does no more for it than that, and passes on to the log what it says: whatever it
meets, a disk or a driver that hangs, meets a process that no other waits for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from orchestrator.node.job import processes
from orchestrator.node.job.ranks.agent_start import PR_SET_PDEATHSIG, prctl
from orchestrator.node.job.run_directory import RunDir

AFTER_SECONDS = 2.0  # a start has better things to do, and a shorter job has nothing to show
END_SECONDS = 1.0
LIBRARY = os.path.abspath(__file__).rsplit(os.sep, 5)[0]
START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1));"
    " from orchestrator.node.main import main; main()"
)


class SamplerProcess:
    """The process beside a job, from some seconds after its start until its end."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.due = time.monotonic() + AFTER_SECONDS
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def wait(self) -> float:
        """Return the seconds until it is to be started."""
        return max(0.0, self.due - time.monotonic())

    def start(self) -> int | None:
        """Start it once it is time; return then where to read what it says."""
        if self.wait:
            return None
        self.due = float("inf")
        names = [self.run.job, str(self.run.node)]
        try:
            reading, writing = os.pipe()
        except OSError:  # no more open files
            return None
        os.set_blocking(reading, False)
        # Where no process is to be had the job goes on without samples.
        with contextlib.suppress(OSError):
            self.process = subprocess.Popen(
                [sys.executable, *processes.OPTIONS, "-c", START, LIBRARY, "sample", *names],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=subprocess.DEVNULL,
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
            )
        os.close(writing)
        return reading

    def end(self) -> None:
        """Kill it: all that it wrote is whole. One that hangs in the kernel is not waited for."""
        self.due = float("inf")
        if self.process is not None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
