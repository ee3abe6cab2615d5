"""Converts times of a node's clock into times of the head's clock.

Without this, a clock that is off by hours would show a job of a minute ago as hours old, or as not
started yet.
"""

from __future__ import annotations

import time
from typing import TypeVar

from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import JobStates
from orchestrator.protocol.requests.machine import CheckedUp

# A smaller difference may be the time that the answer took.
MISLEADS_SECONDS = 2.0

# Assumed drift between two clocks in seconds per second: ten times that of quartz.
DRIFT_SECONDS = 1e-4

M = TypeVar("M", bound=Message)


def ahead(theirs: float, ours: float) -> float:
    """Return how far a clock is ahead of ours; 0 for a difference of at most MISLEADS_SECONDS."""
    return theirs - ours if abs(theirs - ours) > MISLEADS_SECONDS else 0.0


def moved(message: M, by: float, *names: str) -> M:
    """Return a copy of the message whose named times are `by` seconds earlier, if they are set."""
    known = {name: getattr(message, name) for name in names}
    return message.replace(**{name: at - by for name, at in known.items() if at}) if by else message


def of_checkup(checkup: Checkup, by: float) -> Checkup:
    """Return a checkup of a machine whose clock is `by` ahead, with user times by our clock."""
    if not by:
        return checkup
    holders, load = checkup.holders, checkup.load
    if holders is not None:
        holders = tuple(moved(holder, by, "since") for holder in holders)
    if load is not None:
        load = load.replace(users=tuple(moved(holder, by, "since") for holder in load.users))
    return checkup.replace(holders=holders, load=load)


def checkup_now(answer: CheckedUp) -> Checkup:
    """Return the checkup of an answer that has just arrived, with its times by our clock."""
    return of_checkup(answer.checkup, ahead(answer.time, time.time()))


def jobs_now(answer: JobStates) -> JobStates:
    by = ahead(answer.time, time.time())
    jobs = tuple(moved(job, by, "started", "ended", "log_time") for job in answer.jobs)
    return answer.replace(jobs=jobs)


class NodeClock:
    """Keeps the offset of a node's clock, from the shortest recent round trip.

    Round trips and ages use the monotonic clock, as the other two clocks may be set at any time.
    """

    def __init__(self) -> None:
        # The node's clock minus ours.
        self.offset = 0.0
        # The largest possible error of the offset, when it was measured.
        self.error = float("inf")
        # The time of the measurement (monotonic).
        self.measured = 0.0

    def heard(self, sent: float, theirs: float) -> bool:
        """Update the offset by an answer to a request of time `sent`; return True if it changed."""
        received = time.monotonic()
        error = (received - sent) / 2
        offset = theirs - (time.time() - error)
        known_to = self.error + DRIFT_SECONDS * (received - self.measured)
        # One of the clocks was set since the last measurement.
        was_set = abs(offset - self.offset) > error + known_to
        if error > known_to and not was_set:
            return False
        self.offset, self.error, self.measured = offset, error, received
        return True


def clock_offset(theirs: float, asked: float, answered: float) -> float:
    """Return how far a clock is ahead of ours that was read between `asked` and `answered`.

    The result is 0 if the clock may be right, as its time lies between the two. The probe takes
    most of the round trip and reads the clock at its end.
    """
    if asked <= theirs <= answered:
        return 0.0
    return theirs - answered + min(0.001, answered - asked)
