"""Turns the times that a node tells by its own clock into times by ours.

A clock that is off by hours would make what began a minute ago look as old, or not begun at all.
"""

from __future__ import annotations

import time
from typing import TypeVar

from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import JobStates
from orchestrator.protocol.requests.machine import CheckedUp

MISLEADS_SECONDS = 2.0  # less says nothing of a clock, as an answer takes a while

DRIFT_SECONDS = 1e-4  # seconds per second that two clocks may part, ten times what quartz does

M = TypeVar("M", bound=Message)


def ahead(theirs: float, ours: float) -> float:
    """Return how far a clock is ahead of ours, where that misleads."""
    return theirs - ours if abs(theirs - ours) > MISLEADS_SECONDS else 0.0


def moved(message: M, by: float, *names: str) -> M:
    """Return the same with some of its times that much earlier; what is not known stays so."""
    known = {name: getattr(message, name) for name in names}
    return message.replace(**{name: at - by for name, at in known.items() if at}) if by else message


def of_checkup(checkup: Checkup, by: float) -> Checkup:
    """Say by our clock since when somebody uses a machine whose clock is that much ahead."""
    if not by:
        return checkup
    holders, load = checkup.holders, checkup.load
    if holders is not None:
        holders = tuple(moved(holder, by, "since") for holder in holders)
    if load is not None:
        load = load.replace(users=tuple(moved(holder, by, "since") for holder in load.users))
    return checkup.replace(holders=holders, load=load)


def checkup_now(answer: CheckedUp) -> Checkup:
    """Take an answer that has just come."""
    return of_checkup(answer.checkup, ahead(answer.time, time.time()))


def jobs_now(answer: JobStates) -> JobStates:
    by = ahead(answer.time, time.time())
    jobs = tuple(moved(job, by, "started", "ended", "log_time") for job in answer.jobs)
    return answer.replace(jobs=jobs)


class NodeClock:
    """Keeps how far a node's clock is from ours: by the shortest round trip that is not too old.

    Round trips and ages are by the monotonic clock: either of the two others may be set meanwhile.
    """

    def __init__(self) -> None:
        self.offset = 0.0  # the node's clock minus ours
        self.error = float("inf")  # at most, when it was measured
        self.measured = 0.0  # monotonic

    def heard(self, sent: float, theirs: float) -> bool:
        """Take an answer to what was `sent` then (monotonic); return whether it tells anything."""
        received = time.monotonic()
        error = (received - sent) / 2
        offset = theirs - (time.time() - error)
        known_to = self.error + DRIFT_SECONDS * (received - self.measured)
        was_set = abs(offset - self.offset) > error + known_to  # a clock, since then
        if error > known_to and not was_set:
            return False
        self.offset, self.error, self.measured = offset, error, received
        return True


def clock_offset(theirs: float, asked: float, answered: float) -> float:
    """Return how far a clock is ahead of ours that was read between two moments; 0 where none is.

    The probe itself takes most of the round trip, and reads the clock at the end. Where its answer
    came late or was read late, the clock may be right for all that is known.
    """
    if asked <= theirs <= answered:
        return 0.0
    return theirs - answered + min(0.001, answered - asked)
