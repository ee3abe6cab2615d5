"""Brings the nodes of a job together again: open channels to all, and nothing of it alive there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from orchestrator.common import interrupt
from orchestrator.common.errors import NodeError, OrchestratorError, StoppedEarly
from orchestrator.common.text import Say
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import serving
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.failure_kinds import of_a_machine
from orchestrator.head.start import growth
from orchestrator.head.start.candidates import Candidate, Choice, choose
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import Living, Stop
from orchestrator.protocol.requests.request import Beat, Request
from orchestrator.protocol.timing import HEAD_PATIENCE, SWEEP_PATIENCE
from orchestrator.records import cordons
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

PROOF_SECONDS = 3 * SWEEP_PATIENCE
LOOK_SECONDS = 1.0  # between two tries to reach a node that is away
AWAY_SECONDS = 3.0  # before another takes the place of a node that was there a moment ago

A = TypeVar("A", bound=Message)


class NotBack(NodeError):
    """A node that the next attempt needs has not come back in time."""


@dataclass(frozen=True)
class Gathered:
    """The nodes of the next attempt, each with an open channel, in their order."""

    nodes: Sequence[NodeRecord]
    channels: Sequence[NodeChannel]
    spares: Sequence[NodeRecord] = ()

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
    """Opens channels to the nodes of the next attempt; waits for one that is away and needed."""

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
        self.open = {
            node.name: channels[node.index] for node in record.nodes if node.index in channels
        }

    def run(self) -> Gathered:
        """Return the nodes with open channels; NotBack says which are missing."""
        patience = self.record.launch.node_loss_timeout
        began, said = time.monotonic(), False
        while True:
            refuse_if_stopped(self.experiment)
            waited = time.monotonic() - began
            choice, away = self.choose(waited)
            if not choice.problem:
                for line in choice.words:
                    self.say(line)
                return self.gathered(choice.nodes)
            if waited > patience:
                raise NotBack(f"{choice.problem}, after {patience:.0f} s", choice.fix)
            if not said and away:
                said = True
                names = ", ".join(away)
                self.say(f"waiting for {names} to come back, for {patience:.0f} s at most")
            time.sleep(LOOK_SECONDS)

    def choose(self, waited: float) -> tuple[Choice, list[str]]:
        """Choose among the nodes that answer, and say who is away.

        A lost node is looked for only where no other can take its place: to find out that it is
        still gone takes as long as a connection may.
        """
        record, cordoned = self.record, cordons.read()
        least, most = bounds_of(record)
        others = bool(record.spares) or least < len(record.nodes)
        there: dict[str, str] = {}

        def look(nodes: Sequence[NodeRecord], *, lost: bool) -> None:
            nodes = [node for node in nodes if lost or node.state != "lost"]
            for node, result in zip(nodes, fleet.everywhere(nodes, self.reach), strict=True):
                away = result.what if isinstance(result, OrchestratorError) else ""
                there[node.name] = away and f"cannot be reached: {away}"

        def candidates() -> list[Candidate]:
            known = [(node, place) for place, node in enumerate(record.nodes)]
            standing = [(node, None) for node in record.spares]
            return [
                Candidate(
                    name=node.name,
                    place=place,
                    problem=there.get(node.name, "is lost"),
                    failures=times_named(record, node.name),
                    cordoned=cordons.words_of(node, cordoned),
                    rests=growth.refusal(record.attempts, node.name, time.time()),
                )
                for node, place in [*known, *standing]
            ]

        look(record.nodes, lost=not others)
        ours = candidates()[: len(record.nodes)]
        if others and (len(ours) < most or not all(one.fit and not one.suspect for one in ours)):
            look(record.spares, lost=False)
        absent = [node.name for node in record.nodes if there.get(node.name, "is lost")]
        fleeting = [name for name in absent if name in there]  # nobody has said that it is lost
        choice = choose(candidates(), least, most)
        if others and choice.problem:
            look([*record.nodes, *record.spares], lost=True)
            choice = choose(candidates(), least, most)
        if fleeting and waited < AWAY_SECONDS and not choice.problem:
            return replace(choice, problem="a node may come back"), absent
        return choice, absent

    def gathered(self, names: Sequence[str]) -> Gathered:
        """Number the nodes anew, each with what it has of the attempt that it began with."""
        known = {node.name: node for node in (*self.record.nodes, *self.record.spares)}
        first = self.record.attempts[0].job
        before = {
            name: node if node.first_job else replace(node, first_job=first, first_node=node.index)
            for name, node in known.items()
        }
        nodes, ranks = list[NodeRecord](), 0
        for index, name in enumerate(names):
            nodes.append(replace(before[name], index=index, first_rank=ranks))
            ranks += before[name].nproc
        for name in set(self.open) - set(names):
            self.open.pop(name).connection.close()
        spares = [node for name, node in before.items() if name not in names]
        return Gathered(nodes, [self.open[name] for name in names], spares)

    def reach(self, node: NodeRecord) -> NodeChannel:
        """Return the channel that is open, which hears from us by that, or open one."""
        channel = self.open.get(node.name)
        if channel is not None:
            try:
                channel.ask(Beat(), HEAD_PATIENCE)
                return channel
            except NodeError:
                channel.connection.close()
                del self.open[node.name]
        self.open[node.name] = serving(self.transport, node)
        return self.open[node.name]


def bounds_of(record: JobRecord) -> tuple[int, int]:
    """Return how few and how many nodes a job may have."""
    count = len(record.attempts[0].nodes if record.attempts else record.nodes)
    least, most = record.launch.node_counts or (count, count)
    return min(least, count), most


def times_named(record: JobRecord, name: str) -> int:
    """Count the attempts whose verdict names this node, and not the program that it ran."""
    return sum(
        verdict["node_name"] == name and of_a_machine(verdict["kind"], verdict["message"])
        for verdict in (attempt.verdict for attempt in record.attempts)
        if verdict is not None
    )


def refuse_if_stopped(experiment: Experiment) -> None:
    """Raise StoppedEarly if the user has asked for the end while nothing ran."""
    if interrupt.end_is_wanted() or experiment.restarts_are_forbidden:
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
