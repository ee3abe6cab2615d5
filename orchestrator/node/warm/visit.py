"""Keeps a standby ready for what follows a job: its next attempt, or the next warm launch.

It imports torch once the ranks have had their first output, so that it does not hold up their
start. A program that says nothing has as long as most take to begin.
"""

from __future__ import annotations

import contextlib
import math
import os
import time

from orchestrator.node.job.run_directory import RunDir, stop_of_all
from orchestrator.node.server.visit import RoomState, ServerSession
from orchestrator.protocol.events import FirstOutput, RankStarted
from orchestrator.protocol.spec import Spec

AFTER_SECONDS = 2.0  # from the first output on: programs say hello, and go on importing
SILENT_SECONDS = 5.0  # from the start of a rank on that prints nothing
IDLE_SECONDS = 3600.0  # if no head ends it
SPARE_SECONDS = 12 * IDLE_SECONDS  # on a spare, which is not asked again
AGAIN_SECONDS = 60.0  # between two looks whether it is still there


class WarmVisit(RoomState):
    """The job that is followed, as far as a standby may be needed after it."""

    def __init__(self, visit: ServerSession) -> None:
        super().__init__(visit)
        self.followed: RunDir | None = None
        self.spec: Spec | None = None
        self.next_look = math.inf

    def follow(self, run: RunDir) -> None:
        """Have a standby ready for what may follow: another attempt, or the next warm launch."""
        self.followed, self.spec, self.next_look = run, None, math.inf
        with contextlib.suppress(OSError, ValueError):
            spec = self.spec = run.read_spec()
            attempt = spec.attempt
            if spec.warm or (attempt is not None and attempt.number <= attempt.restarts):
                self.next_look = 0.0

    def beat(self) -> None:
        self.check(time.time())

    def check(self, now: float) -> None:
        """Start the standby when it is time, and again if a restart may need it and it is gone."""
        if now < self.next_look or self.followed is None or self.spec is None:
            return
        if now < due(self.followed):
            return
        again = self.spec.attempt is not None and self.spec.attempt.restarts
        self.next_look = now + AGAIN_SECONDS if again else math.inf
        self.start(self.followed, IDLE_SECONDS)

    def job_over(self) -> None:
        """Leave a standby for the next launch, now that the followed job is over."""
        if self.followed is None or stop_of_all() != self.visit.stop_of_all:
            return
        run, self.followed = self.followed, None
        if self.spec is not None and self.spec.warm:
            self.start(run)

    def start(self, run: RunDir, least: float = 0.0) -> None:
        from orchestrator.node.warm import standbys  # not for every job

        standbys.start(run, os.environ, self.visit.umask, least)


def due(run: RunDir) -> float:
    """Return when the ranks are past their beginning, as far as it can be seen (Unix time)."""
    delays = {FirstOutput: AFTER_SECONDS, RankStarted: SILENT_SECONDS + AFTER_SECONDS}
    events = [event for event in run.read_events() if type(event) in delays]
    return min((event.time + delays[type(event)] for event in events), default=math.inf)
