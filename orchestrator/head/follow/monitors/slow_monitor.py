"""Notices a rank that holds the others up.

Where ranks compute on processors, nodes are asked now and then which collectives each rank entered,
and when. What GPUs do comes with the samples of their nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path

from orchestrator.head.follow.monitors import slow_sources
from orchestrator.head.follow.monitors.slow_sources import COMPUTE, INPUT, LATE
from orchestrator.head.follow.monitors.watcher import Watcher
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.protocol.requests.follow import AskPaces, Pace
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.metrics import samples
from orchestrator.records.metrics.samples import RecentSamples
from orchestrator.records.outcome import SlowRank

FIRST = 30.0  # seconds: a job's begin says nothing of its pace
EVERY, SUSPECTS = 60.0, 15.0  # seconds to the next look
ANSWER_SECONDS = 3.0  # that ranks take to write what they remember


class SlowMonitor(Watcher[None]):
    """Reports a rank when two looks in a row find it slow; each node and cause once."""

    def __init__(
        self,
        job: str,
        nodes: Sequence[NodeRecord],
        outputs: Path,
        report: Callable[[SlowRank], None],
    ) -> None:
        super().__init__(after=FIRST)
        self.job, self.nodes, self.outputs, self.report = job, nodes, outputs, report
        self.before: dict[int, Pace] = {}  # rank -> what it said last time
        self.recent: dict[int, RecentSamples] = {}  # node -> its samples
        self.last: dict[int, float] = {}  # node -> the time of the newest one
        self.named: set[tuple[str, int]] = set()

    def watch(self) -> Generator[float, None, None]:
        suspect = None  # a node
        while sum(node.nproc for node in self.nodes) >= 2:
            self._find_gpus()
            if self.recent:
                found = self._gpu()
            else:
                for read in (False, True):
                    self.ask(partial(self.question, read=read))
                    yield ANSWER_SECONDS
                found = self._rank()
            if found is None or found.node != suspect:
                suspect = None if found is None else found.node
                yield EVERY if found is None else SUSPECTS
                continue
            if (found.cause, found.node) not in self.named:
                self.named.add((found.cause, found.node))
                self.report(found)
            yield EVERY

    def question(self, follower: NodeFollower, *, read: bool) -> AskPaces:
        return AskPaces(job=self.job, node=follower.node.index, read=read)

    def _rank(self) -> SlowRank | None:
        paces = {
            rank: self.answers[node.index].paces[rank]
            for node in self.nodes
            if node.index in self.answers
            for rank in self.answers[node.index].paces.keys() & node.numbers
        }
        before, self.before = self.before, paces
        if len(paces) < sum(node.nproc for node in self.nodes):
            return None
        node_of = {r: node for node in self.nodes for r in node.numbers}
        clocks = {follower.node.index: follower.clock for follower in self.followers}
        if not clocks.keys() >= self.answers.keys():
            return None
        ahead = {rank: clocks[node_of[rank].index].offset for rank in paces}
        error = max(clock.error for clock in clocks.values()) if len(clocks) > 1 else 0.0
        late = slow_sources.late_rank(paces, ahead, error)
        if late is None or slow_sources.is_denied(late, before, paces):
            return None
        cause, reason = {
            None: (LATE, ""),
            True: (INPUT, ": it waits for its data, a disk or a lock"),
            False: (COMPUTE, ": it computes longer"),
        }[slow_sources.waits(late, before, paces)]
        node = node_of[late.rank]
        text = f"rank {late.rank} (node {node.index}, {node.name}) holds the others up for"
        text = f"{text} {late.part:.0%} of each step{reason}"
        return SlowRank(cause=cause, node=node.index, rank=late.rank, text=text)

    def _find_gpus(self) -> None:
        """Look which nodes tell what their GPUs do."""
        for node in self.nodes:
            path = samples.newest(self.outputs, node.index)
            if path is None or node.index in self.recent:
                continue
            if samples.machine(path).models:
                self.recent[node.index] = RecentSamples(path, slow_sources.SAMPLES)

    def _gpu(self) -> SlowRank | None:
        # Where ranks are fewer than GPUs it is unknown here which ones they use.
        full = {
            node.index: node
            for node in self.nodes
            if node.index in self.recent
            and len(self.recent[node.index].machine.models) == node.nproc
        }
        samples = {index: tuple(self.recent[index].read()) for index in full}
        last = {index: each[-1].time if each else 0.0 for index, each in samples.items()}
        before, self.last = self.last, last
        # A driver that hangs lets its GPUs seem as they were.
        samples = {i: each for i, each in samples.items() if last[i] != before.get(i)}
        models = {index: self.recent[index].machine.models for index in full}
        found = slow_sources.slow_gpu(samples, models)
        if found is None:
            return None
        node = full[found.node]
        who = f"GPU {found.gpu} of node {node.index} ({node.name})"
        rank, text = node.first_rank + found.gpu, f"{who} {found.text}"
        return SlowRank(cause=found.cause, node=node.index, rank=rank, text=text)
