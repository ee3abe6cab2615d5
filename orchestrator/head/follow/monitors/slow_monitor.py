"""Notices a rank that holds the others up.

Where ranks compute on processors, nodes are asked now and then which collectives each rank entered,
and when.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial

from orchestrator.head.follow.monitors.late_rank import is_denied, late_rank
from orchestrator.head.follow.monitors.watcher import Watcher
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.protocol.requests.follow import AskPaces, Pace
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.outcome import SlowRank

FIRST = 30.0  # seconds: a job's begin says nothing of its pace
EVERY, SUSPECTS = 60.0, 15.0  # seconds to the next look
ANSWER_SECONDS = 3.0  # that ranks take to write what they remember
LATE = "late rank"  # the cause, as job.json has it


class SlowMonitor(Watcher[None]):
    """Reports a rank when two looks in a row find it late; each node once."""

    def __init__(
        self, job: str, nodes: Sequence[NodeRecord], report: Callable[[SlowRank], None]
    ) -> None:
        super().__init__(after=FIRST)
        self.job, self.nodes, self.report = job, nodes, report
        self.before: dict[int, Pace] = {}  # rank -> what it said last time

    def watch(self) -> Generator[float, None, None]:
        suspect, named = None, set()  # nodes
        while sum(node.nproc for node in self.nodes) >= 2:
            for read in (False, True):
                self.ask(partial(self.question, read=read))
                yield ANSWER_SECONDS
            found = self.late()
            again = found is not None and found.node == suspect
            if found is not None and again and found.node not in named:
                named.add(found.node)
                self.report(found)
            suspect = None if found is None else found.node
            yield EVERY if found is None or again else SUSPECTS

    def question(self, follower: NodeFollower, *, read: bool) -> AskPaces:
        return AskPaces(job=self.job, node=follower.node.index, read=read)

    def late(self) -> SlowRank | None:
        """Return the rank that the others wait for, if all ranks have answered."""
        node_of = {rank: node for node in self.nodes for rank in node.numbers}
        paces = {
            rank: pace
            for index, answer in self.answers.items()
            for rank, pace in answer.paces.items()
            if rank in node_of and node_of[rank].index == index
        }
        before, self.before = self.before, paces
        clocks = {follower.node.index: follower.clock for follower in self.followers}
        if paces.keys() != node_of.keys() or not clocks.keys() >= self.answers.keys():
            return None
        ahead = {rank: clocks[node_of[rank].index].offset for rank in paces}
        error = max(clock.error for clock in clocks.values()) if len(clocks) > 1 else 0.0
        late = late_rank(paces, ahead, error)
        if late is None or is_denied(late, before, paces):
            return None
        node = node_of[late.rank]
        who = f"rank {late.rank} (node {node.index}, {node.name})"
        text = f"{who} holds the others up for {late.part:.0%} of each step"
        return SlowRank(cause=LATE, node=node.index, rank=late.rank, text=text)
