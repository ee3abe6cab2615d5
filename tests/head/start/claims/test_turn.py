"""Whose turn it is: first come, first served."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from orchestrator.head.start.claims.turn import count_before, holders, obstacles
from orchestrator.protocol.requests.claims import RUNNING, WAITING, Entry
from orchestrator.protocol.requests.start import Page


def waits(id: str, order: float, wants: int = 1) -> Entry:
    return Entry(id=id, state=WAITING, job=id, user="ada", since=order, order=order, wants=wants)


def runs(id: str, count: int) -> Entry:
    keys = tuple(f"{id}-{i}" for i in range(count))
    return Entry(id=id, state=RUNNING, job=id, user="bob", since=1.0, keys=keys)


def node(free: int, wants: int, *entries: Entry) -> Page:
    return Page(entries=entries, free=free, total=8, wants=wants)


@pytest.mark.parametrize(
    ("mine", "page", "why"),
    [
        (waits("m", 9), node(8, 8), ""),
        (waits("m", 9), node(7, 8, runs("x", 1)), "7 of 8 free"),
        # Who came first goes first; of two that came at once, the one with the lower id;
        (waits("m", 9), node(4, 4, waits("x", 3, 8), runs("y", 4)), "ada's x waits before it"),
        (waits("m", 2), node(4, 4, waits("x", 3, 8)), ""),
        (waits("m", 3), node(4, 4, waits("x", 3, 8)), ""),
        (waits("m", 3), node(4, 4, waits("a", 3, 8)), "ada's a waits before it"),
        # but for one that leaves enough.
        (waits("m", 9), node(4, 2, waits("x", 3, 2)), ""),
        (waits("m", 9), node(4, 2, waits("x", 3, 2), waits("y", 4, 1)), "ada's y waits before it"),
    ],
)
def test_who_may_start(mine: Entry, page: Page, why: str) -> None:
    assert obstacles(mine, {"a": page}, 1) == ({"a": why} if why else {})


def test_some_of_the_nodes_are_enough() -> None:
    there = {"a": node(8, 8), "b": node(7, 8, runs("x", 1)), "c": node(8, 8)}
    assert obstacles(waits("m", 9), there, 2) == {}
    assert obstacles(waits("m", 9), there, 3) == {"b": "7 of 8 free"}


def test_who_has_it_and_who_is_before_it_is_said() -> None:
    there = node(4, 8, runs("x", 4), waits("y", 3), waits("z", 99))
    assert holders(there) == "; bob's x has the rest"
    assert (count_before(waits("m", 9), [there, there]), holders(node(8, 8))) == (1, "")


# -- the whole queue, played ----------------------------------------------------------------------


@dataclass
class Launch:
    entry: Entry
    wants: dict[str, int]
    seconds: int
    started: int | None = None

    def runs_at(self, now: int) -> bool:
        return self.started is not None and self.started <= now < self.started + self.seconds


def drawn(seed: int) -> list[Launch]:
    """Launches of all sizes on three nodes."""
    dice = random.Random(seed)
    launches = []
    for at in range(12):
        seconds = dice.randint(1, 9)
        wants = {n: dice.randint(1, 4) for n in dice.sample("abc", dice.randint(1, 3))}
        launches.append(Launch(waits(f"{at:02d}", float(at)), wants, seconds))
    return launches


def played(launches: list[Launch], may_start: Callable[[Launch, int], bool]) -> list[int]:
    """When each of them starts."""
    for now in itertools.count():
        assert now < 200, "somebody waits forever"
        for one in launches:
            if one.started is None and may_start(one, now):
                one.started = now
            assert all(free(launches, name, now) >= 0 for name in "abc")
        if all(one.started is not None for one in launches):
            return [one.started or 0 for one in launches]
    raise AssertionError


def free(launches: list[Launch], name: str, now: int) -> int:
    return 4 - sum(one.wants.get(name, 0) for one in launches if one.runs_at(now))


@pytest.mark.parametrize("seed", range(20))
def test_nobody_starts_later_than_in_a_line_that_nobody_may_pass(seed: int) -> None:
    launches = drawn(seed)

    def seen(name: str, now: int, but: Launch) -> Iterator[Entry]:
        for one in launches:
            if one is not but and name in one.wants and one.started is None:
                yield one.entry.replace(wants=one.wants[name])
            elif one is not but and name in one.wants and one.runs_at(now):
                yield runs(one.entry.id, one.wants[name])

    def in_turn(one: Launch, now: int) -> bool:
        pages = {
            name: node(free(launches, name, now), wants, *seen(name, now, one))
            for name, wants in one.wants.items()
        }
        return not obstacles(one.entry, pages, len(pages))

    ours = played(launches, in_turn)
    line = drawn(seed)

    def in_line(one: Launch, now: int) -> bool:
        before = [o for o in line if o.entry.order < one.entry.order and o.started is None]
        shares = any(o.wants.keys() & one.wants.keys() for o in before)
        return not shares and all(free(line, n, now) >= w for n, w in one.wants.items())

    strict = played(line, in_line)
    assert all(mine <= theirs for mine, theirs in zip(ours, strict, strict=True))
    assert sum(ours) <= sum(strict)
