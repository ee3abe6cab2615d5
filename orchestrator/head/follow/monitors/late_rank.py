"""Finds the rank that the others wait for, from when each one entered the same collectives. Pure.

All ranks begin a step together, as the step before ended with collectives of all. So a rank that
comes to one of them later than the others has held them up for as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.protocol.requests.follow import Pace

PART = 0.15  # of each step, which is lost by waiting for it
LEAST = 0.005  # seconds of it
STEADY = 0.8  # of the steps: on a busy machine it is now this one, now that one
LEAST_STEPS = 10


@dataclass(frozen=True)
class Late:
    """A rank that the others wait for in nearly every step."""

    rank: int
    part: float  # of a step


def late_rank(
    paces: Mapping[int, Pace], ahead: Mapping[int, float], error: float = 0.0
) -> Late | None:
    """Return the rank that holds the others up; `ahead`: by how much the clock of each one is.

    `error` is how wrong that may be, for the worst of them.
    """
    lengths = {pace.length for pace in paces.values()}
    if len(paces) < 2 or len(lengths) != 1 or min(lengths) < 1:
        return None
    length = lengths.pop()
    ranks = sorted(paces)
    numbers = sorted(set.intersection(*(set(pace.times) for pace in paces.values())))
    entered = {n: [paces[rank].times[n] - ahead.get(rank, 0.0) for rank in ranks] for n in numbers}
    lasts = {number: max(times) for number, times in entered.items()}
    steps: dict[int, list[int]] = {}
    for number in numbers:
        steps.setdefault(number // length, []).append(number)
    if len(steps) < LEAST_STEPS:
        return None
    ends = [(step, lasts[each[-1]]) for step, each in steps.items()]
    between = [(after[1] - one[1]) / (after[0] - one[0]) for one, after in pairwise(ends)]
    seconds = statistics.median(between)
    least = max(PART * seconds, LEAST + 2 * error)
    by = {  # rank -> by how much it was late in each step
        rank: [max(lateness(entered[number], place) for number in step) for step in steps.values()]
        for place, rank in enumerate(ranks)
    }
    rank = max(by, key=lambda each: statistics.median(by[each]))
    often = sum(seconds_late >= least for seconds_late in by[rank])
    if seconds <= 0 or often < STEADY * len(steps):
        return None
    return Late(rank, min(1.0, statistics.median(by[rank]) / seconds))


def lateness(times: Sequence[float], place: int) -> float:
    """Return by how much one of them is later than the others."""
    return times[place] - statistics.median([*times[:place], *times[place + 1 :]])


def waits(late: Late, before: Mapping[int, Pace], now: Mapping[int, Pace]) -> bool | None:
    """Tell whether what makes it late is a wait and not its computing; None where unknown.

    The others sleep for as long as they wait for it. What each rank sleeps besides is not why.
    """
    slept = {rank: asleep(before.get(rank), pace) for rank, pace in now.items()}
    own = slept.pop(late.rank)
    others = [part for part in slept.values() if part is not None]
    if own is None or not others:
        return None
    usual = max(0.0, statistics.median(others) - late.part)
    return own - usual >= late.part / 2


def asleep(before: Pace | None, now: Pace) -> float | None:
    """Return the part of the time between two answers in which a rank's program waited."""
    if before is None or before.awake is None or now.awake is None or now.at <= before.at:
        return None
    return max(0.0, 1.0 - (now.awake - before.awake) / (now.at - before.at))
