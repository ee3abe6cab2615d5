"""Leaves processes ready for the next attempt of a job, or for the next launch."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from orchestrator.node.job.run_directory import RunDir, stop_of_all
from orchestrator.node.server.visit import RoomState, Visit

if TYPE_CHECKING:
    from orchestrator.node.warm.next_attempt import NextAttempt


class WarmVisit(RoomState):
    """The job that is followed, as far as processes may be needed after it."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit)
        self.followed: RunDir | None = None
        self.next_attempt: NextAttempt | None = None  # of a job that may be restarted

    def follow(self, run: RunDir) -> None:
        """Have processes ready for what may follow: another attempt, or the next warm launch."""
        self.followed, self.next_attempt = run, None
        with contextlib.suppress(OSError, ValueError):
            spec = run.read_spec()
            attempt = spec.attempt
            if spec.warm or (attempt is not None and attempt.number <= attempt.restarts):
                from orchestrator.node.warm.next_attempt import NextAttempt  # not for every job

                self.next_attempt = NextAttempt(run, spec, os.environ, self.visit.umask)

    def beat(self) -> None:
        """See that processes are ready for the next attempt of the job that is followed."""
        if self.next_attempt is not None:
            self.next_attempt.check(time.monotonic())

    def job_over(self) -> None:
        """Leave processes that are ready for the next job, now that the followed one is over."""
        if self.followed is None or stop_of_all() != self.visit.stop_of_all:
            return
        run, self.followed = self.followed, None
        with contextlib.suppress(OSError, ValueError):
            if run.read_spec().warm:
                from orchestrator.node.warm import pairs

                pairs.start(run, os.environ, self.visit.umask)
