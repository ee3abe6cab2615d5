"""Decides how one node's part of a job ends, for the supervisor that runs it. These are the phases:

    PROLOG --- it ended well -----------------------> RUNNING    torchrun starts.
    PROLOG, RUNNING --- a rank failed, or an order -> ENDING     SIGTERM goes to ranks or prolog.
    PROLOG, RUNNING, ENDING
           --- torchrun or the prolog has ended ----> SWEEPING   SIGTERM goes to what is left.
    SWEEPING --- nothing lives, or only processes that
                 survive SIGKILL -------------------> EPILOG, or OVER where there is none
    EPILOG --- it ended ----------------------------> SWEEPING   What it left is killed.

The first cause of an end counts, and what comes later is its consequence. An end has one grace, the
user's, after which everything is killed; a later order can only shorten it. After a failure only
the ranks that handle SIGTERM themselves have it: the others are killed after HURRY_SECONDS, and
what outlives torchrun after SWEEP_SECONDS.
"""

from __future__ import annotations

from enum import Enum

from orchestrator.protocol.events import EndOrder

HURRY_SECONDS = 1.0
SWEEP_SECONDS = 0.5
SURVIVES_SECONDS = 10.0  # a process that survives SIGKILL this long hangs in the kernel
NEVER = float("inf")


class Phase(Enum):
    PROLOG = "prolog"
    RUNNING = "running"
    ENDING = "ending"
    SWEEPING = "sweeping"
    EPILOG = "epilog"
    OVER = "over"


class Cause(Enum):
    NOTHING = "nothing"
    ORDER = "an order"
    RANK = "a rank of this node failed"
    AGENT = "torchrun failed"


class Due(Enum):
    """What the supervisor does next."""

    NOTHING = "nothing"
    SPARE = "kill all but the ranks that handle SIGTERM, and what works for them"
    KILL = "kill everything"


class PartEnd:
    """All times are monotonic, but for `since`."""

    def __init__(self, grace: float, *, epilog: bool = False) -> None:
        self.grace = grace  # the user's
        self.phase = Phase.RUNNING
        self.epilog = epilog  # there is one, and it has not run yet
        self.cause = Cause.NOTHING
        self.why = ""  # the first order's
        self.since = NEVER  # Unix time of the first order
        self.spare_at = self.kill_at = NEVER
        self.killed_at = NEVER  # when all that lived in SWEEPING was killed

    @property
    def asked(self) -> bool:
        return bool(self.why)

    @property
    def sweeps(self) -> bool:
        """Return whether torchrun has ended, or never started."""
        return self.phase in (Phase.SWEEPING, Phase.EPILOG, Phase.OVER)

    def run_command(self, phase: Phase, now: float, limit: float) -> None:
        """Let the prolog or the epilog run, so long at most."""
        self.phase, self.kill_at = phase, now + limit
        self.spare_at = self.killed_at = NEVER

    def run_ranks(self) -> None:
        self.phase, self.kill_at = Phase.RUNNING, NEVER

    def order(self, order: EndOrder, cause: Cause, now: float, at: float) -> bool:
        """Take an order to end, given at a Unix time; return whether the ranks are to be asked."""
        failed = order.failed or order.lost is not None
        if self.phase is not Phase.EPILOG or not order.grace:
            self.kill_at = min(self.kill_at, now + order.grace)
            self.spare_at = min(self.spare_at, now + HURRY_SECONDS if failed else NEVER)
        self.since = min(self.since, at)
        if self.cause is Cause.NOTHING:
            self.cause = cause
        self.why = self.why or order.why
        if self.phase not in (Phase.PROLOG, Phase.RUNNING):
            return False
        self.phase = Phase.ENDING
        return True

    def agent_ended(self, code: int) -> bool:
        """Return whether torchrun failed by itself; `sweep` comes next."""
        if code and self.cause is Cause.NOTHING:
            self.cause = Cause.AGENT
            return True
        return False

    def sweep(self, now: float) -> None:
        """End what torchrun or the prolog has left."""
        self.phase = Phase.SWEEPING
        self.spare_at = now + SWEEP_SECONDS
        self.kill_at = min(self.kill_at, now + max(self.grace, SWEEP_SECONDS))

    def epilog_ended(self) -> None:
        """Kill what the epilog left running, at the next turn."""
        self.phase, self.kill_at = Phase.SWEEPING, NEVER
        self.spare_at = self.killed_at = NEVER

    def due(self, now: float) -> Due:
        if now >= self.kill_at:
            return Due.KILL
        return Due.SPARE if now >= self.spare_at else Due.NOTHING

    def spared(self, now: float) -> None:
        """Note that all but some was killed; they are spared until `kill_at`."""
        self.spare_at = now + SWEEP_SECONDS if self.phase is Phase.SWEEPING else NEVER

    def killed(self, now: float) -> None:
        """Note that everything was killed."""
        self.kill_at = self.spare_at = NEVER
        if self.phase is Phase.SWEEPING:
            self.killed_at = min(self.killed_at, now)

    def left(self, *, alive: bool, now: float) -> Phase:
        """Take whether anything lives, while SWEEPING; return what comes next."""
        if not alive or now - self.killed_at > SURVIVES_SECONDS:
            self.phase = Phase.EPILOG if self.epilog else Phase.OVER
            self.epilog = False
        elif self.kill_at == NEVER:
            self.kill_at = now  # born while the others were being killed
        return self.phase

    def wait(self, now: float) -> float:
        """Return the seconds until something is due."""
        return max(0.0, min(self.kill_at, self.spare_at) - now)
