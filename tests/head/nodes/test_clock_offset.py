import random

import pytest

from orchestrator.head.nodes import clock as clock_module
from orchestrator.head.nodes.clock import NodeClock


class Times:
    """Our two clocks, and one of a node; each exchange takes as long as it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ours, self.theirs = 50.0, 1e9, 1e9
        self.clock = NodeClock()
        monkeypatch.setattr(clock_module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + self.ours

    def exchange(self, there: float, back: float) -> bool:
        """Return True if the answer changed what is known."""
        sent, self.now, before = self.now, self.now + there + back, self.clock.measured
        self.clock.heard(sent, sent + there + self.theirs)
        return self.clock.measured != before


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    return Times(monkeypatch)


@pytest.mark.parametrize("offset", [-3600.0, -0.2, 0.0, 0.001, 86400.0])
def test_offset_error_is_within_half_of_shortest_round_trip(offset: float, times: Times) -> None:
    """Ways there and back of any length: never further off than half a round trip."""
    shortest = float("inf")
    times.theirs += offset
    for _ in range(20):
        there, back = random.uniform(0.0005, 0.2), random.uniform(0.0005, 0.2)
        times.exchange(there, back)
        shortest = min(shortest, there + back)
        times.now += 1
    assert times.clock.offset == pytest.approx(offset, abs=shortest / 2 + 1e-3)


def test_long_round_trip_is_ignored_until_drift_is_possible(times: Times) -> None:
    times.theirs += 10.0
    assert times.exchange(0.001, 0.001)
    times.now += 10.0
    assert not times.exchange(0.9, 0.1)
    assert times.clock.offset == pytest.approx(10.0)
    times.now += 10000.0
    times.theirs += 0.8
    assert times.exchange(0.1, 0.1), "after hours, what is known may be a second off"
    assert times.clock.offset == pytest.approx(10.8)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_clock_step_is_noticed_at_next_answer(whose: str, jump: float, times: Times) -> None:
    """However long that answer takes; and what comes after it is taken as before."""
    assert times.exchange(0.001, 0.001)
    setattr(times, whose, getattr(times, whose) + jump)
    true = times.theirs - times.ours
    assert times.exchange(0.4, 0.1)
    assert times.clock.offset == pytest.approx(true, abs=0.3)
    assert times.exchange(0.002, 0.002)
    assert times.clock.offset == pytest.approx(true, abs=0.01)
    assert not times.exchange(0.4, 0.1)


def test_clock_step_during_answer_is_corrected(times: Times) -> None:
    sent = times.now
    times.now += 0.02
    times.ours -= 3600.0
    times.clock.heard(sent, sent + 0.01 + times.theirs)
    assert times.clock.offset == pytest.approx(3600.0, abs=0.02)
    times.exchange(0.001, 0.001)
    assert times.clock.offset == pytest.approx(3600.0, abs=0.002)


@pytest.mark.parametrize(
    ("theirs", "ahead"),
    [
        (4.9, 0.0),
        # The greeting came late or was sent early, so a start of 5 s proves no offset.
        (0.1, 0.0),
        (-1.0, -5.999),
        (8.0, 3.001),
    ],
)
def test_late_greeting_keeps_offset_right(theirs: float, ahead: float, times: Times) -> None:
    begun, times.now = times.now, times.now + 5.0
    times.clock.greeted(begun, begun + theirs + times.ours)
    assert times.clock.offset == pytest.approx(ahead)


def test_delayed_answer_is_ignored(times: Times) -> None:
    times.clock.greeted(times.now - 0.3, times.now + times.theirs)
    times.exchange(0.001, 60.0)
    assert times.clock.offset == 0.0
