"""Measures how far a node's clock is from ours: a node reads it in the middle of a round trip.

Asked for by the follower of each node; the run orders events of several nodes by it.
"""

from __future__ import annotations

DRIFT = 1e-4  # seconds per second that two clocks may part, ten times what quartz does


class Clock:
    """Keeps the best offset: of the shortest round trip, unless that was too long ago."""

    def __init__(self) -> None:
        self.offset = 0.0  # the node's clock minus ours
        self.error = float("inf")  # at most, when it was measured
        self.measured = 0.0

    def heard(self, sent: float, theirs: float, received: float) -> bool:
        """Take an exchange; return whether it improved the offset."""
        error = (received - sent) / 2
        if error > self.error + DRIFT * (received - self.measured):
            return False
        self.offset, self.error, self.measured = theirs - (sent + received) / 2, error, received
        return True
