"""Finds the GPU that holds the others of a job up, by the samples that come home from its nodes.

A GPU that waits in a collective is busy, as its driver counts. So one that is idle for part of the
time while all others are busy is the one that they wait for, and its program is what it waits for.
One that is as busy, but has a lower clock than others of its model, computes more slowly.

A GPU is named only if it costs the others a good part of the time in most of the samples.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orchestrator.records.experiment import NodeRecord
from orchestrator.records.metrics import samples
from orchestrator.records.metrics.samples import RecentSamples, Sample
from orchestrator.records.outcome import SlowRank

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


FIRST_SECONDS = 30.0  # The beginning of a job says nothing of its pace.
EVERY_SECONDS, SUSPECT_SECONDS = 60.0, 15.0  # to the next look


class SlowMonitor:
    """Reports a rank when two looks in a row find its GPU slow; each node and cause once."""

    def __init__(
        self, nodes: Sequence[NodeRecord], outputs: Path, report: Callable[[SlowRank], None]
    ) -> None:
        self.nodes, self.outputs, self.report = nodes, outputs, report
        self.due_at = time.monotonic() + FIRST_SECONDS
        self.recent: dict[int, RecentSamples] = {}  # node -> its samples
        self.last: dict[int, float] = {}  # node -> the time of the newest one
        self.suspect: int | None = None  # a node
        self.named: set[tuple[str, int]] = set()

    def check(self) -> None:
        now = time.monotonic()
        if now < self.due_at:
            return
        found = self.find()
        again = found is not None and found.node == self.suspect
        self.suspect = None if found is None else found.node
        self.due_at = now + (SUSPECT_SECONDS if found and not again else EVERY_SECONDS)
        if found and again and (found.cause, found.node) not in self.named:
            self.named.add((found.cause, found.node))
            self.report(found)

    def find(self) -> SlowRank | None:
        """Return the rank whose GPU the others wait for."""
        for node in self.nodes:
            path = samples.newest(self.outputs, node.index)
            if path and node.index not in self.recent and samples.machine(path).models:
                self.recent[node.index] = RecentSamples(path, SAMPLES)
        # Where ranks are fewer than GPUs it is unknown here which ones they use.
        full = {
            node.index: node
            for node in self.nodes
            if node.index in self.recent
            and len(self.recent[node.index].machine.models) == node.nproc
        }
        read = {index: tuple(self.recent[index].read()) for index in full}
        before, self.last = (
            self.last,
            {i: each[-1].time if each else 0.0 for i, each in read.items()},
        )
        # A driver that hangs lets its GPUs seem as they were.
        moving = {i: each for i, each in read.items() if self.last[i] != before.get(i)}
        models = {index: self.recent[index].machine.models for index in full}
        found = slow_gpu(moving, models)
        if found is None:
            return None
        node = full[found.node]
        text = f"GPU {found.gpu} of node {node.index} ({node.name}) {found.text}"
        rank = node.first_rank + found.gpu
        return SlowRank(cause=found.cause, node=node.index, rank=rank, text=text)
