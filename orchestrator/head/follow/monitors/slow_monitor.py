"""Notices a GPU that holds the others up, from the samples that come home from its node."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.head.follow.monitors import slow_gpus
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.metrics import samples
from orchestrator.records.metrics.samples import RecentSamples
from orchestrator.records.outcome import SlowRank

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
                self.recent[node.index] = RecentSamples(path, slow_gpus.SAMPLES)
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
        found = slow_gpus.slow_gpu(moving, models)
        if found is None:
            return None
        node = full[found.node]
        text = f"GPU {found.gpu} of node {node.index} ({node.name}) {found.text}"
        rank = node.first_rank + found.gpu
        return SlowRank(cause=found.cause, node=node.index, rank=rank, text=text)
