"""Brings the nodes of a job together again: open channels to all, and nothing of it alive there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from orchestrator import interrupt
from orchestrator.errors import NodeError, OrchestratorError, StoppedEarly
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.transport import Transport
from orchestrator.protocol.message import Message
from orchestrator.protocol.messages import Beat, Living, Request, Stop
from orchestrator.protocol.timing import HEAD_PATIENCE, SWEEP_PATIENCE
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

PROOF_SECONDS = 3 * SWEEP_PATIENCE
LOOK_SECONDS = 1.0  # between two tries to reach a node that is away

Say = Callable[[str], None]
A = TypeVar("A", bound=Message)


class NotBack(NodeError):
    """A node that the next attempt needs has not come back in time."""


@dataclass(frozen=True)
class Gathered:
    """The nodes of the last attempt, each with an open channel, in their order."""

    nodes: Sequence[NodeRecord]
    channels: Sequence[NodeChannel]

    def ask(self, requests: Sequence[Request[A]], timeout: float) -> list[A]:
        """Ask each node its own request; one error names every node that failed."""
        pairs = list(zip(self.channels, requests, strict=True))
        results = fleet.everywhere(pairs, lambda pair: pair[0].ask(pair[1], timeout))
        answers = [result for result in results if not isinstance(result, OrchestratorError)]
        if len(answers) == len(results):
            return answers
        raise first_error(self.nodes, results)


def first_error(
    nodes: Sequence[NodeRecord], results: Sequence[object | OrchestratorError]
) -> NodeError:
    failed = [
        f"{node.name}: {result.what}"
        for node, result in zip(nodes, results, strict=True)
        if isinstance(result, OrchestratorError)
    ]
    return NodeError("; ".join(failed))


class Gathering:
    """Waits until all nodes are there, for as long as a node may be away."""

    def __init__(
        self,
        experiment: Experiment,
        record: JobRecord,
        transport: Transport,
        channels: Mapping[int, NodeChannel],
        say: Say,
    ) -> None:
        self.experiment, self.record, self.transport = experiment, record, transport
        self.say = say
        self.open = dict(channels)

    def run(self) -> Gathered:
        """Return all nodes with open channels; NotBack names those that stay away."""
        patience = self.record.launch.node_loss_timeout
        deadline, said = time.monotonic() + patience, False
        while True:
            refuse_if_stopped(self.experiment)
            results = fleet.everywhere(self.record.nodes, self.reach)
            channels = [result for result in results if isinstance(result, NodeChannel)]
            if len(channels) == len(results):
                return Gathered(self.record.nodes, channels)
            pairs = list(zip(self.record.nodes, results, strict=True))
            away = [node.name for node, result in pairs if not isinstance(result, NodeChannel)]
            names = ", ".join(away)
            if time.monotonic() > deadline:
                why = first_error(self.record.nodes, results).what
                raise NotBack(f"{names} did not come back within {patience:.0f} s ({why})")
            if not said:
                said = True
                self.say(f"waiting for {names} to come back, for {patience:.0f} s at most")
            time.sleep(LOOK_SECONDS)

    def reach(self, node: NodeRecord) -> NodeChannel:
        """Return the channel that is open, which hears from us by that, or open one."""
        channel = self.open.get(node.index)
        if channel is not None:
            try:
                channel.ask(Beat(), HEAD_PATIENCE)
                return channel
            except NodeError:
                channel.connection.close()
                del self.open[node.index]
        connection = self.transport.connect(self.transport.config.of_node(node))
        self.open[node.index] = open_channel(connection, node, self.transport.timeout)
        return self.open[node.index]


def refuse_if_stopped(experiment: Experiment) -> None:
    """Raise StoppedEarly if the user has asked for the end while nothing ran."""
    held = interrupt.release()
    interrupt.hold()
    if held or experiment.restarts_are_forbidden:
        raise StoppedEarly("stopped by the user")


def prove_the_end(record: JobRecord, gathered: Gathered) -> None:
    """See that nothing of the attempts so far lives on these nodes; end what does."""
    parts = [tuple(parts_of(record, node.name)) for node in gathered.nodes]
    answers = gathered.ask([Living(runs=runs) for runs in parts], PROOF_SECONDS)
    for node, channel, answer in zip(gathered.nodes, gathered.channels, answers, strict=True):
        for job, index in answer.living:
            why = "the job is started again"
            order = Stop(job=job, node=index, why=why, grace=0, wait=SWEEP_PATIENCE, for_good=False)
            receipt = channel.ask(order, PROOF_SECONDS)
            if receipt.left:
                raise NodeError(f"{node.name}: processes {list(receipt.left)} of {job} do not end")


def parts_of(record: JobRecord, name: str) -> Iterator[tuple[str, int]]:
    """Yield the parts that a node had in the attempts so far."""
    for attempt in record.attempts:
        for index, node in enumerate(attempt.nodes):
            if node == name:
                yield attempt.job, index
