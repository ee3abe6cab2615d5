"""How far the clock of a node is ahead of the head's.

Times of a node become times of the head as its messages are decoded (protocol/message.py). Without
this, a clock that is off by hours would show a job of a minute ago as hours old, or as not started
yet.
"""

from __future__ import annotations

import time

# Assumed drift between two clocks in seconds per second: ten times that of quartz.
DRIFT_SECONDS = 1e-4


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

    def greeted(self, begun: float, theirs: float) -> None:
        """Set the offset by the greeting of a server that was started at the time `begun`.

        It is 0 if the clock may be right, as its time lies between the two. The start takes most of
        the time, and reads the clock at its end.
        """
        received = time.monotonic()
        took, ahead = received - begun, theirs - time.time()
        self.offset = 0.0 if -took <= ahead <= 0.0 else ahead + min(0.001, took)
        # The answer to a heartbeat may wait here for minutes, and teaches nothing then.
        self.error, self.measured = took, received

    def heard(self, sent: float, theirs: float) -> None:
        """Update the offset by an answer to a request of time `sent`, unless it teaches nothing."""
        received = time.monotonic()
        error = (received - sent) / 2
        offset = theirs - (time.time() - error)
        known_to = self.error + DRIFT_SECONDS * (received - self.measured)
        # One of the clocks was set since the last measurement.
        was_set = abs(offset - self.offset) > error + known_to
        if error <= known_to or was_set:
            self.offset, self.error, self.measured = offset, error, received
