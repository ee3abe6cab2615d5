"""Who gives what to whom, for any number of nodes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.head.transfer.schedule import ORIGIN, givers


def test_two_get_it_from_the_origin_and_each_gives_it_to_two() -> None:
    """All begin at once, since each gives on what it has while the rest comes."""
    assert givers([None] * 8) == [ORIGIN, ORIGIN, 0, 0, 1, 1, 2, 2]


def test_between_two_sites_it_goes_once() -> None:
    assert givers(["a", "b", "a", "b", "b", "b"]) == [ORIGIN, ORIGIN, 0, 1, 1, 3]
    assert givers(["a", "a", "b", "b"], width=1) == [ORIGIN, 0, 1, 2]


@given(st.lists(st.sampled_from([None, "a", "b"]), max_size=40), st.integers(1, 3))
def test_each_takes_from_one_that_begins_before_it(sites: list[str | None], width: int) -> None:
    """None gives to more than `width`."""
    chosen = givers(sites, width)
    assert all(ORIGIN <= giver < taker for taker, giver in enumerate(chosen))
    assert max(Counter(chosen).values(), default=0) <= width
