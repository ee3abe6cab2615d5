"""Give nodes that a job may need later what they need for it: spares, and those that come late."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.common.errors import CheckFailed, OrchestratorError
from orchestrator.common.hosts import listed
from orchestrator.common.text import Say, plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached, reach
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.plan.model import NodePlan
from orchestrator.head.start import code
from orchestrator.head.start.nodes import probe_of, settled
from orchestrator.head.start.planning import Meeting, Prepared, make_plan, specs
from orchestrator.head.start.record import node_record
from orchestrator.head.transfer.code.shared import marker
from orchestrator.protocol.requests.start import Start
from orchestrator.records.experiment import JobRecord, NodeRecord

STAND_BY_SECONDS = 30.0


def keep(prepared: Prepared, meeting: Meeting, say: Say) -> list[NodeRecord]:
    """Give each spare its part, if the job may be started again; return those that have it."""
    try:
        return stand_by(prepared, meeting, say)
    finally:
        for spare in prepared.nodes.spares:
            spare.channel.connection.close()


def stand_by(prepared: Prepared, meeting: Meeting, say: Say) -> list[NodeRecord]:
    nodes, plan = prepared.nodes, prepared.plan
    if not (prepared.request.config.launch.max_restarts and nodes.spares):
        return []
    if not anywhere(prepared):
        say("the spares are of no use to this job: what it runs is on its own nodes only")
        return []
    able, parts = list[Reached](), list[NodePlan]()
    for spare in nodes.spares:
        try:
            parts.append(part_of(prepared, spare, len(plan.nodes) + len(parts)))
            able.append(spare)
        except OrchestratorError as error:
            say(f"{spare.node.name} cannot stand by: {error.what}")
    answers = fleet.ask(able, orders(prepared, parts, meeting), STAND_BY_SECONDS)
    standing = []
    for part, spare, answer in zip(parts, able, answers, strict=True):
        if isinstance(answer, OrchestratorError):
            say(f"{spare.node.name} cannot stand by: {answer.what}")
        else:
            standing.append(replace(node_record(part), state="standing by"))
    if standing:
        say(f"{plural(len(standing), 'spare node')}: {listed([n.name for n in standing])}")
    return standing


def anywhere(prepared: Prepared) -> bool:
    """Tell whether the job could run on a node that had no part in its start."""
    return prepared.request.payload is None and prepared.request.accelerate is None


def part_of(prepared: Prepared, spare: Reached, index: int) -> NodePlan:
    """Plan the job as if the spare were its last node; what depends on its place is set later."""
    port = prepared.plan.master_port
    probed = replace(spare, facts=spare.facts.replace(port=port))
    nodes = replace(prepared.nodes, reached=(*prepared.nodes.reached[:-1], probed), spares=())
    plan = make_plan(prepared.request, nodes, prepared.plan.job, str(prepared.experiment.path))
    return replace(plan.nodes[-1], index=index)


def orders(prepared: Prepared, parts: Sequence[NodePlan], meeting: Meeting) -> list[Start]:
    plan = replace(prepared.plan, nodes=tuple(parts))
    return [Start(spec=spec, later=True) for spec in specs(prepared.request, plan, meeting)]


@dataclass(frozen=True)
class Latecomers:
    """Gives a part to nodes that were away at the launch, cordoned or not fit, or have lost theirs.

    Only the process that has launched the job knows what that takes.
    """

    prepared: Prepared
    meeting: Meeting
    numbers: Iterator[int]  # of their parts

    @classmethod
    def of(cls, prepared: Prepared, meeting: Meeting) -> Latecomers | None:
        """Return them where the job may be started again, and any node can run it."""
        launch = prepared.request.config.launch
        # A hook is asked on all nodes together, when none of them runs anything yet.
        if not launch.max_restarts or not anywhere(prepared) or launch.hook:
            return None
        first = len(prepared.plan.nodes) + len(prepared.nodes.spares)
        return cls(prepared, meeting, itertools.count(first))

    def absent(self, record: JobRecord) -> list[Node]:
        """Return the nodes of the list that have no part in the job."""
        known = {node.name for node in (*record.nodes, *record.spares)}
        return [node for node in self.prepared.nodes.source.nodes if node.name not in known]

    def reach(self, node: Node) -> tuple[NodeRecord, Reached]:
        """Reach a node, and plan what it would run; nothing is left there."""
        prepared, launch = self.prepared, self.prepared.request.config.launch
        transport, settled_node = prepared.nodes.transport, settled(node, launch)
        peers = [reached.node for reached in prepared.nodes.reached]
        question = probe_of(prepared.request, transport, [*peers, settled_node])
        with marker(Path.cwd()) as path:  # which it sees if it shares this directory
            reached = reach(transport, settled_node, question.replace(marker=path))
        reached = replace(reached, node=replace(settled_node, spare=True))
        then = reached
        if self.needs_code(reached):  # the directory need not be there
            then = code.at_snapshot(reached, code.expected(prepared.request, reached))
        try:
            return node_record(part_of(prepared, then, 0)), reached
        except BaseException:
            reached.channel.connection.close()
            raise

    def needs_code(self, node: Reached) -> bool:
        """Tell whether a node is to run the job in a snapshot that is made for it."""
        request = self.prepared.request
        return code.needs_code(request) and code.gets_snapshot(request, node)

    def stand_by(self, reached: Reached, say: Say) -> NodeRecord:
        """Give a node the code and its part, as a spare has them from the start."""
        request, scan = self.prepared.request, self.prepared.nodes.scan
        prepared = self.prepared
        if self.needs_code(reached):
            if scan is None:
                raise CheckFailed("it does not share the directory that the others run in")
            request = code.relative(request, [reached], [reached])
            prepared = replace(prepared, request=request)
            reached = code.bring_late(request, reached, scan, say)
        part = part_of(prepared, reached, next(self.numbers))
        (order,) = orders(prepared, [part], self.meeting)
        reached.channel.ask(order, STAND_BY_SECONDS)
        return replace(node_record(part), state="standing by")

    def renew(self, node: NodeRecord, say: Say) -> NodeRecord:
        """Give a node its part anew, which has nothing of it any more."""
        listed = {known.name: known for known in self.prepared.nodes.source.nodes}
        if node.name not in listed:
            raise CheckFailed(f"{node.name} is not in the node list any more")
        say(f"{node.name} is given its part of the job again")
        _, reached = self.reach(listed[node.name])
        try:
            return self.stand_by(reached, say)
        finally:
            reached.channel.connection.close()
