"""Reports for a Trainer, over all of its trainings: lines on rank 0, and the trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.engine.observe.reporter import say
from orchestrator.engine.observe.trackers import Trackers
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.trackers.known import Tracker


class Reporting:
    """Prints lines unless it is quiet, and holds the trackers."""

    def __init__(self, ranks: Ranks, trackers: Sequence[str | Tracker] | Mapping[str, Any]) -> None:
        self.ranks, self.quiet = ranks, False
        self.trackers = Trackers(trackers, ranks, self.say)

    def say(self, text: str) -> None:
        if not self.quiet:
            say(self.ranks, text)
