"""Finds the GPU that holds the others of a job up, by the samples of its nodes. Pure.

A GPU that waits in a collective is busy, as its driver counts. So one that is idle for part of the
time while all others are busy is the one that they wait for, and its program is what it waits for.
One that is as busy, but has a lower clock than others of its model, computes more slowly.

A GPU is named only if it costs the others a good part of the time in most of the samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.records.metrics.samples import Sample

# Causes, as job.json has them. From outside a data loader, a disk and a lock look alike.
COMPUTE, INPUT = "slow compute", "slow input"
PART = 0.15  # of the time that has to be lost by it
STEADY = 0.8  # of the looks
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
