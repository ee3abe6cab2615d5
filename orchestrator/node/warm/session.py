"""Keeps a standby ready for what follows a job: its next attempt, or the next warm launch.

The standby imports torch only after the ranks' first output, so that it does not slow down their
start. Of a program without output it is assumed that it has imported its own modules soon: torch
was there when its ranks were forked.
"""

from __future__ import annotations

import contextlib
import math
import os
import time

from orchestrator.node.job.run_directory import RunDir, stop_of_all
from orchestrator.node.server.session import ServerSession, SessionState
from orchestrator.protocol.events import FirstOutput, RankStarted
from orchestrator.protocol.spec import Spec

# Counted from the first output: programs print a line, and go on importing.
AFTER_SECONDS = 1.0
# Counted from the start of a rank that prints nothing.
SILENT_SECONDS = 1.0
# The standby exits after this time if no head ends it.
IDLE_SECONDS = 3600.0
# Used on a spare node, whose standby is not renewed.
SPARE_SECONDS = 12 * IDLE_SECONDS
# The interval of the checks that the standby still exists.
AGAIN_SECONDS = 60.0


class StandbySession(SessionState):
    """The standby that may be needed after the followed job."""

    def __init__(self, session: ServerSession) -> None:
        super().__init__(session)
        self.followed: RunDir | None = None
        self.spec: Spec | None = None
        self.next_look = math.inf

    def follow(self, run: RunDir) -> None:
        """Plan a standby for a possible next attempt or the next warm launch."""
        self.followed, self.spec, self.next_look = run, None, math.inf
        with contextlib.suppress(OSError, ValueError):
            spec = self.spec = run.read_spec()
            if spec.warm or spec.attempt <= spec.restarts:
                self.next_look = 0.0

    def beat(self) -> None:
        self.check(time.time())

    def check(self, now: float) -> None:
        """Start the standby when it is due, and again if a restart may need it and it is gone."""
        if now < self.next_look or self.followed is None or self.spec is None:
            return
        if now < due_time(self.followed):
            return
        self.next_look = now + AGAIN_SECONDS if self.spec.restarts else math.inf
        self.start(self.spec, IDLE_SECONDS)

    def job_over(self) -> None:
        """Start a standby for the next launch, as the followed job is over."""
        if self.followed is None or stop_of_all() != self.session.stop_of_all:
            return
        self.followed = None
        if self.spec is not None and self.spec.warm:
            self.start(self.spec)

    def start(self, spec: Spec, least: float = 0.0) -> None:
        # Most jobs do not need this import.
        from orchestrator.node.warm import standbys

        standbys.start_standby(spec, os.environ, self.session.umask, least)


def due_time(run: RunDir) -> float:
    """Return the Unix time at which the ranks are probably past their imports."""
    delays = {FirstOutput: AFTER_SECONDS, RankStarted: SILENT_SECONDS + AFTER_SECONDS}
    events = [event for event in run.read_events() if type(event) in delays]
    return min((event.time + delays[type(event)] for event in events), default=math.inf)
