"""Finds the GPU that the others of a job wait for, from what each node samples of its own. Pure.

A GPU that waits in a collective is busy, as its driver counts. So one that is idle for part of the
time while all others are busy is the one that they wait for, and its program is what it waits for;
one that is as busy, but has a lower clock than others of its model, computes more slowly.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.records.metrics.samples import Sample

LOOKS = 10  # samples: nearly a minute
STEADY = 0.8  # of them
BUSY = 0.9  # of the time: all others are
IDLER = 0.15  # of the time that it is idle longer
SLOWER = 0.85  # of the others' clock
COMPUTE, WAITS = "slow compute", "slow input"


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
    (node, gpu), least = min(usual.items(), key=lambda item: item[1])
    rest = [value for other, value in usual.items() if other != (node, gpu)]
    if min(rest) >= BUSY:
        typical = statistics.median(rest)
        idler = sum(value <= typical - IDLER for value in use[node, gpu])
        if idler >= STEADY * len(use[node, gpu]):
            return SlowGpu(
                node,
                gpu,
                WAITS,
                f"is busy {least:.0%} of the time, the others {typical:.0%}: they wait for it, and"
                " it waits for its program (a data loader, a disk, the processors)",
            )
    return slow_clock(table(samples, "mhz"), usual, models)


def slow_clock(
    clocks: Mapping[tuple[int, int], Sequence[float]],
    use: Mapping[tuple[int, int], float],
    models: Mapping[int, Sequence[str]],
) -> SlowGpu | None:
    if min(use.values()) < BUSY:
        return None
    usual = {gpu: statistics.median(values) for gpu, values in clocks.items()}
    for (node, gpu), values in sorted(clocks.items()):
        model = model_of(models, node, gpu)
        equal = [o for o in usual if o != (node, gpu) and model_of(models, *o) == model]
        # A machine that is hot throttles all that it has.
        elsewhere = [other for other in equal if other[0] != node] or equal
        typical = statistics.median([usual[other] for other in elsewhere]) if elsewhere else 0.0
        if sum(value <= SLOWER * typical for value in values) >= STEADY * len(values):
            text = f"runs at {usual[node, gpu]:.0f} MHz, the others at {typical:.0f} MHz"
            return SlowGpu(node, gpu, COMPUTE, text)
    return None


def model_of(models: Mapping[int, Sequence[str]], node: int, gpu: int) -> str:
    known = models.get(node, ())
    return known[gpu] if gpu < len(known) else ""


def table(samples: Mapping[int, Sequence[Sample]], name: str) -> dict[tuple[int, int], list[float]]:
    """Return a value of every GPU in the last samples: those that have it in each of them."""
    found: dict[tuple[int, int], list[float]] = {}
    for node, several in samples.items():
        last = [sample.gpus.get(name, []) for sample in several if sample.gpus][-LOOKS:]
        if len(last) < LOOKS:
            continue
        for gpu, values in enumerate(zip(*last, strict=False)):
            known = [value for value in values if value is not None]
            if len(known) == LOOKS:
                found[node, gpu] = known
    return found
