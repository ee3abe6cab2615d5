"""Keeps a pair ready for what follows a job while it runs: its next attempt, the next launch.

It imports what the ranks have imported, once these have had their first output, so that it does not
hold up their start. A program that says nothing has as long as most take to begin.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping

from orchestrator.node.job.hang import IMPORTS, knock
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.warm import pairs, setting
from orchestrator.protocol.events import FirstOutput, RankStarted
from orchestrator.protocol.spec import Spec

AFTER_SECONDS = 2.0  # from the first output on: programs say hello, and go on importing
SILENT_SECONDS = 5.0  # from the start of a rank on that prints nothing
IDLE_SECONDS = 3600.0  # should nobody be there to end it
SPARE_SECONDS = 12 * IDLE_SECONDS  # on a spare, at which nobody looks again
AGAIN_SECONDS = 60.0  # between two looks whether it is still there


class NextAttempt:
    """One look after another, for as long as a head follows the job."""

    def __init__(self, run: RunDir, spec: Spec, environ: Mapping[str, str], umask: int) -> None:
        self.run, self.umask, self.environ = run, umask, dict(environ)
        self.restarts = spec.attempt is not None and bool(spec.attempt.restarts)
        self.begun = False  # the ranks have printed something, or never will
        self.silent_until = 0.0
        self.next_look = 0.0

    def check(self, now: float) -> None:
        """Start the pair when it is time, and again should it be gone."""
        if now < self.next_look:
            return
        if not self.begun:
            self.begun = self.has_begun(now)
            if self.begun:
                self.next_look = now + AFTER_SECONDS
                knock(os.path.join(self.run.path, "ask_0"), IMPORTS)
            return
        self.next_look = now + AGAIN_SECONDS if self.restarts else math.inf
        pairs.start(self.run, self.environ, self.umask, IDLE_SECONDS)

    def has_begun(self, now: float) -> bool:
        """Tell whether the ranks are past their beginning, as far as it can be seen."""
        for event in self.run.read_events():
            if isinstance(event, FirstOutput):
                return True
            if isinstance(event, RankStarted) and not self.silent_until:
                self.silent_until = now + SILENT_SECONDS
        return 0.0 < self.silent_until <= now


def end(spec: Spec, environ: Mapping[str, str], umask: int) -> None:
    """End the pair of a job that is over for good."""
    with contextlib.suppress(OSError, ValueError):
        wanted = setting.setting_of(spec, environ, pairs.library(), umask)
        for pair in pairs.all_pairs():
            if pair.key == setting.key_of(wanted):
                pairs.end(pair)
