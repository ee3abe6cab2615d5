"""Finds the rank that holds the others of a job up, whatever program it runs. Pure.

All ranks begin a step together, as the step before ended with collectives of all. So a rank that
comes to one of them later than the others has held them up for as long.

A rank is named only if it costs the others a good part of most steps. On a busy machine the latest
is now this one, now that one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.protocol.requests.follow import Pace

PART = 0.15  # of the time that has to be lost by it
STEADY = 0.8  # of the steps
LEAST_SECONDS = 0.005  # of each step
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
    steps: dict[int, list[list[float]]] = {}  # of each collective, when every rank entered it
    for number in sorted(set.intersection(*(set(pace.times) for pace in paces.values()))):
        times = [paces[rank].times[number] - ahead.get(rank, 0.0) for rank in ranks]
        steps.setdefault(number // length, []).append(times)
    if len(steps) < LEAST_STEPS:
        return None
    ends = [(step, max(entered[-1])) for step, entered in steps.items()]
    seconds = statistics.median(
        (after[1] - one[1]) / (after[0] - one[0]) for one, after in pairwise(ends)
    )
    lost = {
        rank: [max(behind(times, at) for times in entered) for entered in steps.values()]
        for at, rank in enumerate(ranks)
    }
    usual = {rank: statistics.median(values) for rank, values in lost.items()}
    rank = max(ranks, key=lambda each: usual[each])
    least = max(PART * seconds, LEAST_SECONDS + 2 * error)
    steady = sum(value >= least for value in lost[rank]) >= STEADY * len(lost[rank])
    return Late(rank, min(1.0, usual[rank] / seconds)) if steady and seconds > 0 else None


def behind(times: Sequence[float], at: int) -> float:
    """Return by how much one of the times is later than the median of the others."""
    return times[at] - statistics.median([*times[:at], *times[at + 1 :]])


def is_denied(late: Late, before: Mapping[int, Pace], now: Mapping[int, Pace]) -> bool:
    """Return True if the rank is late because other programs have its cores."""
    parts = {
        rank: (pace.denied - before[rank].denied) / (pace.at - before[rank].at)
        for rank, pace in now.items()
        if rank in before and pace.at > before[rank].at
    }
    own = parts.pop(late.rank, 0.0)
    return own - statistics.median(parts.values() or [0.0]) >= late.part / 2
