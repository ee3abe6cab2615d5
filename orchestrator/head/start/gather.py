"""Connect to the nodes of the next attempt, choose among them, and end old processes of the job."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from orchestrator.common import interrupt
from orchestrator.common.errors import NodeError, OrchestratorError, StoppedEarly
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import open_serving_channel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.events import of_launch
from orchestrator.head.follow import restarts
from orchestrator.head.screen.events import tell
from orchestrator.head.start import claims
from orchestrator.head.start.selection import Candidate, Choice, choose_candidates
from orchestrator.protocol.requests.follow import Living, LivingRuns, Stop
from orchestrator.protocol.timing import (
    ANSWER_SECONDS,
    DEATH_SECONDS,
    HEAD_PATIENCE_SECONDS,
    RETURN_SECONDS,
    SPARED_SECONDS,
)
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

log = logging.getLogger(__name__)

# The pause between two tries to reach a node that is away.
PAUSE_SECONDS = 1.0
NOTHING_LEFT = "has lost its part of the job, as with another disk"


class NotBack(NodeError):
    """A node that the next attempt needs has not come back in time."""


@dataclass(frozen=True)
class Gathered:
    """The nodes of the next attempt, each with an open channel, in their order."""

    nodes: Sequence[NodeRecord]
    channels: Sequence[NodeChannel]
    spares: Sequence[NodeRecord] = ()


class Gathering:
    """Opens channels to the nodes of the next attempt; waits for one that is away and needed."""

    def __init__(
        self,
        experiment: Experiment,
        record: JobRecord,
        transport: Transport,
        channels: Mapping[int, NodeChannel],
    ) -> None:
        self.experiment, self.record, self.transport = experiment, record, transport
        nodes = [node for node in record.nodes if node.index in channels]
        self.open = {node.name: channels[node.index] for node in nodes}
        # The answers by the node's name.
        self.answers: dict[str, LivingRuns | OrchestratorError] = {}
        # The jobs or users that have a node's GPUs, by the node's name.
        self.occupied: dict[str, str] = {}

    def run(self) -> Gathered:
        """Wait for the nodes of the next attempt and return them, connected and holding their GPUs.

        Raises NotBack after the node loss timeout, StoppedEarly if the user stops the job.
        """
        patience = self.record.launch.node_loss_timeout
        began, said = time.monotonic(), False
        while True:
            refuse_if_stopped(self.experiment)
            waited = time.monotonic() - began
            choice = self.choose(waited)
            log.debug("after %.1f s: %s", waited, choice.problem or choice.nodes)
            if choice.nodes:
                # If a node's GPUs are taken, another node may take its place in the next round.
                if self.hold(choice.nodes):
                    for line in choice.words:
                        tell(of_launch.NodesChanged(line))
                    return self.gathered(choice.nodes)
                continue
            if waited > patience:
                fix = "bring the nodes back, or add a line with 'spare' to the node list"
                raise NotBack(f"{choice.problem}, after {patience:.0f} s", fix)
            away = [node.name for node in self.record.nodes if self.problem(node)]
            if away and not said:
                tell(of_launch.WaitsForNodes(", ".join(away), patience))
            said = said or bool(away)
            self.occupied.clear()
            time.sleep(PAUSE_SECONDS)

    def choose(self, waited: float) -> Choice:
        """Choose among the nodes that answer.

        A lost node is tried only if no other can take its place: finding out that it is still
        gone takes a whole connect timeout.
        """
        record = self.record
        least, most = restarts.node_bounds(record)
        others = bool(record.spares) or least < len(record.nodes)
        self.answers.clear()
        self.ask_nodes(record.nodes, lost=not others)
        ours = self.candidates()[: len(record.nodes)]
        if others and (len(ours) < most or not all(one.good for one in ours)):
            self.ask_nodes(record.spares, lost=False)
        if len(record.nodes) < most:
            gone = [node for node in record.spares if node.state == "lost"]
            fleet.start_thread(partial(self.ask_nodes, gone, lost=True)).join(RETURN_SECONDS)
        choice = choose_candidates(self.candidates(), least, most)
        resting = {one.name for one in self.candidates() if one.rests}
        if others and (choice.problem or resting & {*choice.nodes}):
            self.ask_nodes([*record.nodes, *record.spares], lost=True)
            choice = choose_candidates(self.candidates(), least, most)
        silent = (isinstance(self.answers.get(node.name), NodeError) for node in record.nodes)
        if others and waited < SPARED_SECONDS and not choice.problem and any(silent):
            return Choice((), problem="a node may come back")
        return choice

    def ask_nodes(self, nodes: Sequence[NodeRecord], *, lost: bool) -> None:
        nodes = [node for node in nodes if lost or node.state != "lost"]
        results = fleet.map_parallel(nodes, self.examine)
        self.answers.update(zip((node.name for node in nodes), results, strict=True))

    def examine(self, node: NodeRecord) -> LivingRuns:
        """Return a node's answer on which runs of the job live there and if it has its job spec."""
        question = Living(parts=((self.record.job, node.part),))
        channel = self.open.get(node.name)
        # The request also tells the node that this head is alive.
        if channel is not None:
            try:
                return channel.ask(question, HEAD_PATIENCE_SECONDS)
            except NodeError:
                channel.connection.close()
        self.open[node.name] = self.reach(node)
        return self.open[node.name].ask(question, ANSWER_SECONDS)

    def reach(self, node: NodeRecord) -> NodeChannel:
        return open_serving_channel(self.transport, node)

    def candidates(self) -> list[Candidate]:
        """Return the nodes of the last attempt as candidates, then the spares."""
        places = {node.name: place for place, node in enumerate(self.record.nodes)}
        return [
            Candidate(
                name=node.name,
                place=places.get(node.name),
                problem=self.problem(node),
                rests=restarts.failures_of_node(self.record, node),
            )
            for node in (*self.record.nodes, *self.record.spares)
        ]

    def problem(self, node: NodeRecord) -> str:
        """Return why a node cannot be used as a clause after its name, "" if it can."""
        answer = self.answers.get(node.name)
        if node.name in self.occupied:
            return f"cannot hold the job's GPUs: {self.occupied[node.name]}"
        if isinstance(answer, OrchestratorError):
            return f"cannot be reached: {answer.what}"
        if answer is None:
            return "is lost"
        return "" if answer.stored else NOTHING_LEFT

    def hold(self, names: Sequence[str]) -> bool:
        """Hold the GPUs of these nodes again; return False if others have taken some."""
        if self.record.launch.claim == "none" or self.record.head_elsewhere:
            return True
        known = {node.name: node for node in (*self.record.nodes, *self.record.spares)}
        wanted = [
            claims.NodeClaim(name, self.open[name], part=(self.record.job, known[name].part))
            for name in names
        ]
        try:
            missing = claims.hold_gpus(wanted).missing
        except NodeError as error:
            missing = dict.fromkeys(error.names, error.what)
        self.occupied.update(missing)
        return not missing

    def gathered(self, names: Sequence[str]) -> Gathered:
        """Renumber the nodes; each keeps the number of its part."""
        before = {node.name: node for node in (*self.record.nodes, *self.record.spares)}
        nodes, ranks = list[NodeRecord](), 0
        for index, name in enumerate(names):
            nodes.append(replace(before[name], index=index, first_rank=ranks, state="starting"))
            ranks += before[name].nproc
        for name in set(self.open) - set(names):
            self.open.pop(name).connection.close()
        for node in nodes:
            self.end_what_lives(node)
        spares = [node for name, node in before.items() if name not in names]
        return Gathered(nodes, [self.open[name] for name in names], spares)

    def end_what_lives(self, node: NodeRecord) -> None:
        """End processes of earlier attempts on a node; raise if some do not end."""
        answer = self.answers[node.name]
        for job, part, attempt in answer.living if isinstance(answer, LivingRuns) else ():
            log.info("%s: ends what still lives of attempt %d", node.name, attempt)
            order = Stop(
                job=job,
                part=part,
                attempt=attempt,
                why="the job is started again",
                grace=0,
                wait=DEATH_SECONDS,
                for_good=False,
            )
            receipt = self.open[node.name].ask(order, ANSWER_SECONDS)
            if receipt.left:
                left = f"processes {list(receipt.left)} of attempt {attempt} do not end"
                raise NodeError(f"{node.name}: {left}", names=[node.name])


def refuse_if_stopped(experiment: Experiment) -> None:
    """Raise StoppedEarly if the user stopped the job while no attempt ran."""
    if interrupt.end_is_wanted() or experiment.restarts_are_forbidden:
        raise StoppedEarly("stopped by the user")
