"""Decides how one node's part of a job ends, for the supervisor that runs it. These are the phases:

    RUNNING --- a rank failed, or an order -> ENDING       SIGTERM goes to the ranks.
    RUNNING, ENDING --- torchrun has ended -> SWEEPING     SIGTERM goes to what is left.
    SWEEPING --- nothing lives, or only processes that
                 survive SIGKILL -----------> OVER

The first cause of an end counts; later ones are its consequences. An end has one grace, the user's,
after which everything is killed; a later order can only shorten it. After a failure only the ranks
that handle SIGTERM themselves get it. The others are killed after HURRY_SECONDS, and processes that
outlive torchrun after SWEEP_SECONDS.
"""

from __future__ import annotations

from enum import Enum

from orchestrator.protocol.events import EndOrder
from orchestrator.protocol.timing import DEATH_SECONDS

HURRY_SECONDS = 1.0
SWEEP_SECONDS = 0.5
NEVER = float("inf")


class Phase(Enum):
    RUNNING = "running"
    ENDING = "ending"
    SWEEPING = "sweeping"
    OVER = "over"


class EndCause(Enum):
    NOTHING = "nothing"
    ORDER = "an order"
    RANK = "a rank of this node failed"
    AGENT = "torchrun failed"


class Due(Enum):
    """The next action of the supervisor."""

    NOTHING = "nothing"
    SPARE = "kill all but the ranks that handle SIGTERM, and what works for them"
    KILL = "kill everything"


class PartEnd:
    """The state of one part's end. All times are monotonic except `since`."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.phase = Phase.RUNNING
        self.cause = EndCause.NOTHING
        # The reason of the first order.
        self.why = ""
        # The Unix time of the first order.
        self.since = NEVER
        self.spare_at = self.kill_at = NEVER
        # The time at which all processes living in SWEEPING were killed.
        self.killed_at = NEVER

    @property
    def asked(self) -> bool:
        return bool(self.why)

    @property
    def sweeps(self) -> bool:
        """Return True if torchrun has ended."""
        return self.phase in (Phase.SWEEPING, Phase.OVER)

    def order(self, order: EndOrder, cause: EndCause, now: float, at: float) -> bool:
        """Apply an order to end, given at a Unix time; return True if ranks must be asked."""
        failed = order.failed or order.lost is not None
        self.kill_at = min(self.kill_at, now + order.grace)
        self.spare_at = min(self.spare_at, now + HURRY_SECONDS if failed else NEVER)
        self.since = min(self.since, at)
        if self.cause is EndCause.NOTHING:
            self.cause = cause
        self.why = self.why or order.why
        if self.phase is not Phase.RUNNING:
            return False
        self.phase = Phase.ENDING
        return True

    def agent_ended(self, code: int) -> bool:
        """Return True if torchrun failed by itself; `sweep` comes next."""
        if code and self.cause is EndCause.NOTHING:
            self.cause = EndCause.AGENT
            return True
        return False

    def sweep(self, now: float) -> None:
        """Begin to end the processes that torchrun has left."""
        self.phase = Phase.SWEEPING
        self.spare_at = now + SWEEP_SECONDS
        self.kill_at = min(self.kill_at, now + max(self.grace, SWEEP_SECONDS))

    def due(self, now: float) -> Due:
        if now >= self.kill_at:
            return Due.KILL
        return Due.SPARE if now >= self.spare_at else Due.NOTHING

    def spared(self, now: float) -> None:
        """Record that all but the spared processes were killed; they have until `kill_at`."""
        self.spare_at = now + SWEEP_SECONDS if self.phase is Phase.SWEEPING else NEVER

    def killed(self, now: float) -> None:
        """Record that everything was killed."""
        self.kill_at = self.spare_at = NEVER
        if self.phase is Phase.SWEEPING:
            self.killed_at = min(self.killed_at, now)

    def left(self, *, alive: bool, now: float) -> None:
        """Record whether anything lives while SWEEPING; the part is over if nothing does."""
        if not alive or now - self.killed_at > DEATH_SECONDS:
            self.phase = Phase.OVER
        elif self.kill_at == NEVER:
            # A process was born while the others were being killed.
            self.kill_at = now

    def wait(self, now: float) -> float:
        """Return the seconds until an action is due."""
        return max(0.0, min(self.kill_at, self.spare_at) - now)
