"""Finds the rank that holds the others of a job up, whatever program it runs. Pure.

All ranks begin a step together, as the step before ended with collectives of all. So a rank that
comes to one of them later than the others has held them up for as long.

A GPU that waits in a collective is busy, as its driver counts. So one that is idle for part of the
time while all others are busy is the one that they wait for, and its program is what it waits for;
one that is as busy, but has a lower clock than others of its model, computes more slowly.

A rank is named only if it costs the others a good part of the time in most of the looks. On a busy
machine the latest is now this one, now that one.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from orchestrator.protocol.requests.follow import Pace
from orchestrator.records.metrics.samples import Sample

# Causes, as job.json has them. From outside a data loader, a disk and a lock look alike.
COMPUTE, INPUT, LATE = "slow compute", "slow input", "late rank"
PART = 0.15  # of the time that has to be lost by it
STEADY = 0.8  # of the looks
LEAST_SECONDS = 0.005  # of each step
LEAST_STEPS = 10
SAMPLES = 10  # that are compared: nearly a minute
BUSY = 0.9  # of the time: all others are
SLOWER = 0.15  # less than the others' clock

K = TypeVar("K", bound=Hashable)


def slowest(lost: Mapping[K, Sequence[float]], least: float) -> tuple[K, float] | None:
    """Return which one loses most, if steadily at least so much, and its usual loss in a look."""
    usual = {one: statistics.median(values) for one, values in lost.items() if values}
    if not usual:
        return None
    one = max(usual, key=lambda each: usual[each])
    looks = sum(value >= least for value in lost[one])
    return (one, usual[one]) if looks >= STEADY * len(lost[one]) else None


Gpu = tuple[int, int]  # its node, and its number there


# -- ranks, by their collectives ----------------------------------------------------------------


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
    between = [(after[1] - one[1]) / (after[0] - one[0]) for one, after in pairwise(ends)]
    seconds = statistics.median(between)
    lost = {
        rank: [max(behind(times, at) for times in entered) for entered in steps.values()]
        for at, rank in enumerate(ranks)
    }
    slow = slowest(lost, max(PART * seconds, LEAST_SECONDS + 2 * error))
    return Late(slow[0], min(1.0, slow[1] / seconds)) if slow and seconds > 0 else None


def behind(times: Sequence[float], at: int) -> float:
    """Return by how much one of the times is later than the median of the others."""
    return times[at] - statistics.median([*times[:at], *times[at + 1 :]])


def waits(late: Late, before: Mapping[int, Pace], now: Mapping[int, Pace]) -> bool | None:
    """Return True if the rank is late by a wait, False by its computing, None where unknown.

    The others sleep for as long as they wait for it. What each rank sleeps besides is not why.
    """
    slept = {rank: asleep(before.get(rank), pace) for rank, pace in now.items()}
    own = slept.pop(late.rank)
    others = [part for part in slept.values() if part is not None]
    if own is None or not others:
        return None
    usual = max(0.0, statistics.median(others) - late.part)
    return own - usual >= late.part / 2


def is_denied(late: Late, before: Mapping[int, Pace], now: Mapping[int, Pace]) -> bool:
    """Return True if the rank is late because other programs have its cores."""
    parts = {rank: part_of("denied", before.get(rank), pace) for rank, pace in now.items()}
    denied = {rank: part for rank, part in parts.items() if part is not None}
    own = denied.pop(late.rank, 0.0)
    return own - statistics.median(denied.values() or [0.0]) >= late.part / 2


def asleep(before: Pace | None, now: Pace) -> float | None:
    """Return the part of the time between two answers in which a rank's program waited."""
    awake = part_of("awake", before, now)
    return None if awake is None else max(0.0, 1.0 - awake)


def part_of(name: str, before: Pace | None, now: Pace) -> float | None:
    """Return the part of the time between two answers that a rank's counter of seconds tells."""
    first, last = getattr(before, name, None), getattr(now, name)
    if before is None or first is None or last is None or now.at <= before.at:
        return None
    return float(last - first) / (now.at - before.at)


# -- GPUs, by their samples ---------------------------------------------------------------------


@dataclass(frozen=True)
class SlowGpu:
    """One GPU that holds the others up."""

    node: int
    gpu: int
    cause: str
    text: str


def slow_gpu(
    samples: Mapping[int, Sequence[Sample]], models: Mapping[int, Sequence[str]]
) -> SlowGpu | None:
    """Return the GPU that holds the others up: node -> its last samples, and its GPUs' models."""
    use = table(samples, "use")
    if len(use) < 2:
        return None
    usual = {gpu: statistics.median(values) for gpu, values in use.items()}
    typical = {gpu: statistics.median([usual[o] for o in usual if o != gpu]) for gpu in usual}
    idle = {gpu: [typical[gpu] - value for value in values] for gpu, values in use.items()}
    slow = slowest(idle, PART)
    if slow and min(value for gpu, value in usual.items() if gpu != slow[0]) >= BUSY:
        gpu, _ = slow
        text = (
            f"is busy {usual[gpu]:.0%} of the time, the others {typical[gpu]:.0%}: they wait for"
            " it, and it waits for its program (a data loader, a disk, the processors)"
        )
        return SlowGpu(*gpu, INPUT, text)
    return slow_clock(table(samples, "mhz"), models) if min(usual.values()) >= BUSY else None


def slow_clock(
    clocks: Mapping[Gpu, Sequence[float]], models: Mapping[int, Sequence[str]]
) -> SlowGpu | None:
    usual = {gpu: statistics.median(values) for gpu, values in clocks.items()}
    typical = {gpu: clock_of_others(gpu, usual, models) for gpu in usual}
    slow = slowest(
        {g: [1 - mhz / typical[g] for mhz in clocks[g]] for g in clocks if typical[g]}, SLOWER
    )
    if slow is None:
        return None
    gpu, _ = slow
    text = f"runs at {usual[gpu]:.0f} MHz, the others at {typical[gpu]:.0f} MHz"
    return SlowGpu(*gpu, COMPUTE, text)


def clock_of_others(
    gpu: Gpu, clocks: Mapping[Gpu, float], models: Mapping[int, Sequence[str]]
) -> float:
    """Return the usual clock of GPUs of the same model, or 0 where there are none.

    A machine that is hot throttles all that it has: those of others tell.
    """
    equal = [o for o in clocks if o != gpu and model_of(models, o) == model_of(models, gpu)]
    elsewhere = [other for other in equal if other[0] != gpu[0]] or equal
    return statistics.median([clocks[other] for other in elsewhere]) if elsewhere else 0.0


def model_of(models: Mapping[int, Sequence[str]], gpu: Gpu) -> str:
    node, number = gpu
    known = models.get(node, ())
    return known[number] if number < len(known) else ""


def table(samples: Mapping[int, Sequence[Sample]], name: str) -> dict[Gpu, list[float]]:
    """Return a value of every GPU in the last samples: those that have it in each of them."""
    found: dict[Gpu, list[float]] = {}
    for node, several in samples.items():
        last = [sample.gpus.get(name, []) for sample in several if sample.gpus][-SAMPLES:]
        if len(last) < SAMPLES:
            continue
        for gpu, values in enumerate(zip(*last, strict=False)):
            known = [value for value in values if value is not None]
            if len(known) == SAMPLES:
                found[node, gpu] = known
    return found
