"""Notices a rank that holds the others up.

Where ranks compute on processors, nodes are asked now and then which collectives each rank entered,
and when. What GPUs do comes with the samples of their nodes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.head.follow.monitors import slow_sources
from orchestrator.head.follow.monitors.slow_sources import COMPUTE, INPUT, LATE
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.protocol.requests.follow import AskPaces, Pace, Paces
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.metrics import samples
from orchestrator.records.metrics.samples import RecentSamples
from orchestrator.records.outcome import SlowRank

EVERY, SUSPECTS = 60.0, 15.0  # seconds to the next look
ANSWER_SECONDS = 3.0  # that ranks take to write what they remember


@dataclass
class SlowMonitor:
    """Tells who is slow when two looks in a row find it so; each node and cause once."""

    job: str
    nodes: Sequence[NodeRecord]
    outputs: Path
    due_at: float = 0.0
    asked: int = 0  # times: to write, and to send what was written
    answers: dict[int, Mapping[int, Pace]] = field(default_factory=dict)  # node -> its ranks
    before: dict[int, Pace] = field(default_factory=dict)  # rank -> what it said last time
    recent: dict[int, RecentSamples] = field(default_factory=dict)  # node -> its samples
    last: dict[int, float] = field(default_factory=dict)  # node -> the time of the newest one
    suspect: int | None = None  # a node
    named: set[tuple[str, int]] = field(default_factory=set)

    def check(self, followers: Sequence[NodeFollower]) -> SlowRank | None:
        """Return who is slow, when that is news; never waits."""
        now = time.monotonic()
        if now < self.due_at or sum(node.nproc for node in self.nodes) < 2:
            return None
        self._find_gpus()
        if not self.recent and not self._heard(followers, now):
            return None
        found = self._gpu() if self.recent else self._rank(followers)
        again = found is not None and found.node == self.suspect
        self.suspect = found.node if found else None
        self.due_at = now + (EVERY if found is None or again else SUSPECTS)
        if found is None or not again or (found.cause, found.node) in self.named:
            return None
        self.named.add((found.cause, found.node))
        return found

    def _heard(self, followers: Sequence[NodeFollower], now: float) -> bool:
        """Ask and ask again, each with a moment for the answer; tell whether that is over."""
        if self.asked == 2:
            self.asked = 0
            return True
        self.answers, self.due_at = {}, now + ANSWER_SECONDS
        for follower in followers:
            node, read = follower.node.index, self.asked == 1
            follower.ask(AskPaces(job=self.job, node=node, read=read))
        self.asked += 1
        return False

    def answer(self, node: int, paces: Paces) -> None:
        self.answers[node] = paces.paces

    def _rank(self, followers: Sequence[NodeFollower]) -> SlowRank | None:
        paces = {
            rank: self.answers[node.index][rank]
            for node in self.nodes
            for rank in self.answers.get(node.index, {}).keys() & node.numbers
        }
        before, self.before = self.before, paces
        if len(paces) < sum(node.nproc for node in self.nodes):
            return None
        node_of = {r: node for node in self.nodes for r in node.numbers}
        clocks = {follower.node.index: follower.clock for follower in followers}
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
        return self._slow(cause, node, late.rank, f"{text} {late.part:.0%} of each step{reason}")

    @staticmethod
    def _slow(cause: str, node: NodeRecord, rank: int, text: str) -> SlowRank:
        return SlowRank(cause=cause, node=node.index, rank=rank, text=text)

    def _find_gpus(self) -> None:
        """Look which nodes tell what their GPUs do."""
        for node in self.nodes:
            path = samples.newest(self.outputs, node.index)
            if path is None or node.index in self.recent:
                continue
            if samples.machine(path).models:
                self.recent[node.index] = RecentSamples(path, slow_sources.SAMPLES)

    def _gpu(self) -> SlowRank | None:
        # Where ranks are fewer than GPUs nobody knows here which ones they use.
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
        return self._slow(found.cause, node, node.first_rank + found.gpu, f"{who} {found.text}")
