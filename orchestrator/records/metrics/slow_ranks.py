"""Who holds the others of a job up: the one decision, whatever it is read from. Pure.

A rank that is slow takes longer than the others by a good part of the time, and does so in most of
the looks: on a busy machine it is now this one, now that one. What is compared are times to compute
and to wait for data (engine/observe/stragglers.py), when each rank entered the same collectives,
and what GPUs do (head/follow/monitors/slow_sources.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

# What holds the others up, as events and job.json have it.
COMPUTE, DATA, LINK, DISK = "slow compute", "slow data loader", "slow link", "slow disk"
INPUT = "slow input"  # a data loader, a disk or a lock: from outside nobody can tell which
LATE = "late rank"  # where it is unknown whether it computes or waits
PART = 0.15  # of the time that has to be lost by it
STEADY = 0.8  # of the looks


def of_others(values: Sequence[float], at: int) -> float:
    """Return the median of all but one."""
    return statistics.median([*values[:at], *values[at + 1 :]])


def excess(values: Sequence[float], at: int) -> float:
    """Return by how much one of the values is above the others."""
    return values[at] - of_others(values, at)


def is_steady(lost: Sequence[float], least: float, looks: float) -> bool:
    """Tell whether so much was lost in at least so many of the looks."""
    return sum(value >= least for value in lost) >= looks


def slowest(lost: Mapping[K, Sequence[float]], least: float) -> tuple[K, float] | None:
    """Return who loses most, if it does so steadily, and how much that is in a usual look."""
    usual = {who: statistics.median(values) for who, values in lost.items() if values}
    if not usual:
        return None
    who = max(usual, key=lambda each: usual[each])
    steady = is_steady(lost[who], least, STEADY * len(lost[who]))
    return (who, usual[who]) if steady else None
