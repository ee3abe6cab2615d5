"""Find a GPU that slows down the other GPUs of a job, from the samples of its nodes.

The driver counts a GPU that waits in a collective as busy. If one GPU is idle part of the time
while all others are busy, they wait for it. That GPU waits for its program. A GPU that is as busy
as the others, but has a lower clock than others of its model, computes more slowly.

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
from orchestrator.records.metrics.samples import Sample
from orchestrator.records.outcome import SlowRank

# The causes as in job.json. From outside a data loader, a disk and a lock look alike.
COMPUTE, INPUT = "slow compute", "slow input"
# The least share of the time that a slow GPU has to cost the others.
PART = 0.15
# The least share of samples in which it is slow.
STEADY = 0.8
# The number of samples that are compared, which cover nearly a minute.
SAMPLES = 10
# The least share of the time for which all others have to be busy.
BUSY = 0.9
# The least relative difference to the clock of the others.
SLOWER = 0.15

K = TypeVar("K", bound=Hashable)


def slowest_gpu(lost: Mapping[K, Sequence[float]], least: float) -> tuple[K, float] | None:
    """Return the key with the largest median loss and that loss, if most samples reach `least`."""
    usual = {one: statistics.median(values) for one, values in lost.items() if values}
    if not usual:
        return None
    one = max(usual, key=lambda each: usual[each])
    looks = sum(value >= least for value in lost[one])
    return (one, usual[one]) if looks >= STEADY * len(lost[one]) else None


# The index of the node, and the GPU's number there.
Gpu = tuple[int, int]


@dataclass(frozen=True)
class SlowGpu:
    """A GPU that slows down the others."""

    node: int
    gpu: int
    cause: str
    text: str


def slow_gpu(
    samples: Mapping[int, Sequence[Sample]], models: Mapping[int, Sequence[str]]
) -> SlowGpu | None:
    """Return the GPU that slows down the others; `samples` and `models` are by node index."""
    use = values_by_gpu(samples, "use")
    if len(use) < 2:
        return None
    usual = {gpu: statistics.median(values) for gpu, values in use.items()}
    typical = {gpu: statistics.median([usual[o] for o in usual if o != gpu]) for gpu in usual}
    idle = {gpu: [typical[gpu] - value for value in values] for gpu, values in use.items()}
    slow = slowest_gpu(idle, PART)
    if slow and min(value for gpu, value in usual.items() if gpu != slow[0]) >= BUSY:
        gpu, _ = slow
        text = (
            f"is busy {usual[gpu]:.0%} of the time, the others {typical[gpu]:.0%}: they wait for"
            " it, and it waits for its program (a data loader, a disk, the processors)"
        )
        return SlowGpu(*gpu, INPUT, text)
    return (
        slow_clock(values_by_gpu(samples, "mhz"), models) if min(usual.values()) >= BUSY else None
    )


def slow_clock(
    clocks: Mapping[Gpu, Sequence[float]], models: Mapping[int, Sequence[str]]
) -> SlowGpu | None:
    usual = {gpu: statistics.median(values) for gpu, values in clocks.items()}
    typical = {gpu: clock_of_others(gpu, usual, models) for gpu in usual}
    slow = slowest_gpu(
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
    """Return the median clock of other GPUs of the same model, 0 if there are none.

    A hot machine throttles all of its GPUs, so GPUs of other machines are preferred.
    """
    equal = [o for o in clocks if o != gpu and model_of(models, o) == model_of(models, gpu)]
    elsewhere = [other for other in equal if other[0] != gpu[0]] or equal
    return statistics.median([clocks[other] for other in elsewhere]) if elsewhere else 0.0


def model_of(models: Mapping[int, Sequence[str]], gpu: Gpu) -> str:
    node, number = gpu
    known = models.get(node, ())
    return known[number] if number < len(known) else ""


def values_by_gpu(samples: Mapping[int, Sequence[Sample]], name: str) -> dict[Gpu, list[float]]:
    """Return the last values of each GPU that has the value `name` in all of the last samples."""
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


# The pause to the next check, normally and after a first finding.
EVERY_SECONDS, SUSPECT_SECONDS = 60.0, 15.0


class SlowMonitor:
    """Reports a rank when two checks in a row find its GPU slow; each node and cause once."""

    def __init__(
        self, nodes: Sequence[NodeRecord], outputs: Path, report: Callable[[SlowRank], None]
    ) -> None:
        self.nodes, self.outputs, self.report = nodes, outputs, report
        self.due_at = 0.0
        # The time of the newest sample by node index.
        self.last: dict[int, float] = {}
        # The index of the node that the last check found.
        self.suspect: int | None = None
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
        """Return the rank whose GPU slows down the others, None if there is none."""
        newest = {
            node.index: samples.newest_sample_file(self.outputs, node.index) for node in self.nodes
        }
        paths = {index: path for index, path in newest.items() if path is not None}
        models = {index: samples.read_machine(path).gpus for index, path in paths.items()}
        # If a node has fewer ranks than GPUs, it is unknown here which GPUs they use.
        full = {
            node.index: node
            for node in self.nodes
            if node.index in paths and len(models[node.index]) == node.nproc
        }
        read = {index: samples.read_last_samples(paths[index], SAMPLES) for index in full}
        before, self.last = (
            self.last,
            {i: each[-1].time if each else 0.0 for i, each in read.items()},
        )
        # A hanging driver repeats old samples, so nodes without a new one are left out.
        moving = {i: each for i, each in read.items() if self.last[i] != before.get(i)}
        found = slow_gpu(moving, models)
        if found is None:
            return None
        node = full[found.node]
        text = f"GPU {found.gpu} of node {node.index} ({node.name}) {found.text}"
        rank = node.first_rank + found.gpu
        return SlowRank(cause=found.cause, node=node.index, rank=rank, text=text)
