"""Decides how a job comes to its end, for the head that follows it. These are the states:

    OPEN ---- a rank, torchrun or a supervisor failed ----> FAILED
              The order to end goes out after HEARSAY_SECONDS: others may report failures.
              At once after SIGKILL to a rank, which is certain to be the cause.
         ---- Ctrl-C, SIGTERM, Slurm's time limit --------> STOPPED   The order goes out at once.
         ---- a node was silent for too long -------------> LOST      The order goes out at once.

The first of these decides the outcome; what comes later is its consequence. With the order begins
the time that the nodes have to say that they have ended; then they are given up. A head can leave
in any state: the job goes on without it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum

from orchestrator.protocol.timing import HEARSAY_SECONDS

log = logging.getLogger(__name__)

END_LIMIT_SECONDS = 30.0  # beyond its grace, for a node to confirm that it has ended


class Outcome(Enum):
    OPEN = "open"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"


@dataclass
class JobEnd:
    """All times are monotonic."""

    outcome: Outcome = Outcome.OPEN
    order_at: float = float("inf")  # when the order goes out
    order_why: str = ""
    give_up_at: float = float("inf")  # what has not ended by then is given up
    left: bool = False  # the head leaves, and the job goes on

    @property
    def open(self) -> bool:
        return self.outcome is Outcome.OPEN

    def fail(self, reason: str, now: float, *, certain: bool = False) -> None:
        log.debug("open -> failed: %s%s", reason, " (certain)" if certain else "")
        self.outcome = Outcome.FAILED
        self.order_at, self.order_why = now + (0.0 if certain else HEARSAY_SECONDS), reason

    def order_is_due(self, now: float) -> bool:
        return now >= self.order_at

    def ordered(self, grace: float, now: float) -> None:
        """Note that every node has been ordered to end."""
        log.debug("%s: every node is ordered to end within %g s", self.outcome.value, grace)
        self.order_at = float("inf")
        self.give_up_at = now + grace + END_LIMIT_SECONDS

    def gives_up(self, now: float) -> bool:
        return now > self.give_up_at
