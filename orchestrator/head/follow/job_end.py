"""The state machine of a job's end, for the head that follows it. These are the states:

    OPEN ---- a rank, torchrun or a supervisor failed ----> FAILED
              The order to end goes out after HEARSAY_SECONDS: others may report failures.
              At once after SIGKILL to a rank, which is certain to be the cause.
         ---- Ctrl-C, SIGTERM, Slurm's time limit --------> STOPPED   The order goes out at once.
         ---- a node was silent for too long -------------> LOST      The order goes out at once.

The first of these decides the outcome; later ones are its consequences. From the order on the nodes
have a limited time to confirm that they have ended; then they are given up. A head can leave in any
state: the job goes on without it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum

from orchestrator.protocol.timing import END_LIMIT_SECONDS, HEARSAY_SECONDS

log = logging.getLogger(__name__)


class Outcome(Enum):
    OPEN = "open"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"


@dataclass
class JobEnd:
    """The state of a job's end. All times are monotonic."""

    outcome: Outcome = Outcome.OPEN
    # The time at which the order to end goes out.
    order_at: float = float("inf")
    order_why: str = ""
    # A node that has not ended by then is given up.
    give_up_at: float = float("inf")
    # True if the head leaves and the job goes on.
    left: bool = False

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
        """Start the time limit after every node was ordered to end."""
        log.debug("%s: every node is ordered to end within %g s", self.outcome.value, grace)
        self.order_at = float("inf")
        self.give_up_at = now + grace + END_LIMIT_SECONDS

    def gives_up(self, now: float) -> bool:
        return now > self.give_up_at
