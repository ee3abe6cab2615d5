from __future__ import annotations

import random

import pytest

from orchestrator.head.nodes.clock import Clock


@pytest.mark.parametrize("offset", [-3600.0, -0.2, 0.0, 0.001, 86400.0])
def test_the_shortest_round_trip_tells(offset: float) -> None:
    """Ways there and back of any length: never further off than half a round trip."""
    clock, now, shortest = Clock(), 1e9, float("inf")
    for _ in range(20):
        there, back = random.uniform(0.0005, 0.2), random.uniform(0.0005, 0.2)
        clock.heard(now, now + there + offset, now + there + back)
        shortest = min(shortest, there + back)
        now += 1
    assert clock.offset == pytest.approx(offset, abs=shortest / 2 + 1e-3)


def test_a_long_way_teaches_nothing_until_the_clocks_may_have_parted() -> None:
    clock = Clock()
    assert clock.heard(0.0, 10.001, 0.002)
    assert not clock.heard(10.0, 25.0, 11.0)
    assert clock.offset == pytest.approx(10.0)
    assert clock.heard(10000.0, 10010.9, 10000.2), "after hours, what is known may be a second off"
    assert clock.offset == pytest.approx(10.8)
