"""Who gives what to whom: for any number of nodes, and whatever fails."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.head.transfer.schedule import HEAD, Order, Rules, Schedule


def pairs(orders: list[Order]) -> list[tuple[int, int]]:
    return [(order.taker, order.giver) for order in orders]


def test_two_get_it_from_the_head_and_each_gives_it_to_two() -> None:
    """All begin at once, since each gives on what it has while the rest comes."""
    schedule = Schedule(range(8))
    assert pairs(schedule.orders()) == [
        *((0, HEAD), (1, HEAD), (2, 0), (3, 0), (4, 1), (5, 1), (6, 2), (7, 2))
    ]
    assert schedule.orders() == []
    for taker in range(8):
        assert not schedule.is_over
        schedule.took(taker)
    assert schedule.is_over and schedule.done == set(range(8))


def test_between_two_sites_it_goes_once() -> None:
    sites = {0: "a", 1: "b", 2: "a", 3: "b", 4: "b", 5: "b"}
    schedule = Schedule(range(6), sites=sites)
    assert pairs(schedule.orders()) == [(0, HEAD), (1, HEAD), (2, 0), (3, 1), (4, 1), (5, 3)]
    schedule = Schedule(range(4), sites={0: "a", 1: "a", 2: "b", 3: "b"}, rules=Rules(width=1))
    assert pairs(schedule.orders()) == [(0, HEAD), (1, 0), (2, 1), (3, 2)]


def test_who_must_have_all_gives_it_then() -> None:
    schedule = Schedule([1, 2, 3, 4, 5], origins=[0], rules=Rules(streams=False))
    assert pairs(schedule.orders()) == [(1, 0), (2, 0)]
    schedule.took(2)
    assert pairs(schedule.orders()) == [(3, 0), (4, 2), (5, 2)]


def test_who_cannot_take_from_another_is_served_by_an_origin() -> None:
    schedule = Schedule(range(4))
    schedule.orders()
    schedule.failed(3)
    assert pairs(schedule.orders()) == [(3, HEAD)]
    schedule.failed(3)
    assert schedule.given_up == {3}


def test_an_origin_is_asked_again_after_a_pause_and_then_the_head_serves() -> None:
    schedule = Schedule([1], origins=[0], rules=Rules(streams=False, pauses=(1.0, 5.0)))
    seen = []
    for _ in range(4):
        (order,) = schedule.orders()
        seen.append((order.giver, order.pause_seconds))
        schedule.failed(1)
    assert seen == [(0, 0.0), (0, 1.0), (0, 5.0), (HEAD, 0.0)]
    assert schedule.is_over and schedule.given_up == {1}


def test_without_a_way_through_the_head_it_is_given_up() -> None:
    schedule = Schedule([1], origins=[0], rules=Rules(streams=False, through_head=False))
    schedule.orders()
    schedule.failed(1)
    assert schedule.is_over and schedule.given_up == {1}


def test_a_lost_node_is_nobodys_giver() -> None:
    schedule = Schedule([1, 2, 3, 4], origins=[0], rules=Rules(streams=False, width=1))
    schedule.orders()
    schedule.took(1)
    assert pairs(schedule.orders()) == [(2, 0), (3, 1)]
    schedule.lost(2)
    schedule.failed(3)
    assert pairs(schedule.orders()) == [(3, 0)]
    schedule.took(3)
    assert pairs(schedule.orders()) == [(4, 0)]


@pytest.mark.parametrize("streams", [True, False])
@given(data=st.data(), count=st.integers(1, 12), width=st.integers(1, 3))
def test_each_has_all_or_is_given_up(
    streams: bool, data: st.DataObject, count: int, width: int
) -> None:
    """Nobody gives who has nothing, and none but an origin gives to more than `width` at once."""
    passes_on = data.draw(st.booleans())
    origins = data.draw(st.sampled_from([[HEAD], [100], [100, 101]]))
    rules = Rules(width=width, streams=streams, passes_on=passes_on, pauses=(1.0,))
    schedule = Schedule(range(count), origins, rules)
    under_way: dict[int, int] = {}
    has = {HEAD, *origins}
    for _ in range(10_000):
        if schedule.is_over:
            break
        for order in schedule.orders():
            assert order.taker not in under_way
            assert order.giver in has | (under_way.keys() if streams else set())
            under_way[order.taker] = order.giver
        serving = Counter(giver for giver in under_way.values() if giver not in (HEAD, *origins))
        assert max(serving.values(), default=0) <= width
        assert under_way, "nobody does anything, and it is not over"
        taker = data.draw(st.sampled_from(sorted(under_way)))
        del under_way[taker]
        what = data.draw(st.sampled_from(["took", "took", "failed", "lost"]))
        getattr(schedule, what)(taker)
        if what == "took":
            has.add(taker)
    assert schedule.is_over
    assert schedule.done | schedule.given_up == set(range(count))
