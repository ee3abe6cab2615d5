"""Give nodes that a job may need later what they need for it: spares, and those that come late."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from orchestrator.common.errors import CheckFailed, OrchestratorError
from orchestrator.common.hosts import listed
from orchestrator.common.text import Say, plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached, reach
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.plan.model import Plan
from orchestrator.head.start import code
from orchestrator.head.start.nodes import probe_of, settled
from orchestrator.head.start.record import node_record
from orchestrator.head.start.recovery.blueprint import Blueprint
from orchestrator.head.start.request import Request
from orchestrator.head.transfer.code.shared import marker
from orchestrator.protocol.requests.start import Start
from orchestrator.records.experiment import NodeRecord

log = logging.getLogger(__name__)

STAND_BY_SECONDS = 30.0


def keep(blueprint: Blueprint, spares: Sequence[Reached], say: Say) -> list[NodeRecord]:
    """Give each spare its part, if the job may be started again; return those that have it."""
    try:
        return stand_by(blueprint, spares, say)
    finally:
        for spare in spares:
            spare.channel.connection.close()


def stand_by(blueprint: Blueprint, spares: Sequence[Reached], say: Say) -> list[NodeRecord]:
    if not (blueprint.request.config.launch.max_restarts and spares):
        return []
    if not anywhere(blueprint.request):
        say("the spares are of no use to this job: what it runs is on its own nodes only")
        return []
    able, parts, orders = list[Reached](), list[Plan](), list[Start]()
    for spare in spares:
        try:
            part = blueprint.part_of(spare)
            orders.append(blueprint.order(spare, part))
            parts.append(part)
            able.append(spare)
        except OrchestratorError as error:
            say(f"{spare.node.name} cannot stand by: {error.what}")
    answers = fleet.ask(able, orders, STAND_BY_SECONDS)
    standing = []
    for part, spare, answer in zip(parts, able, answers, strict=True):
        if isinstance(answer, OrchestratorError):
            say(f"{spare.node.name} cannot stand by: {answer.what}")
        else:
            standing.append(replace(node_record(part.nodes[0]), state="standing by"))
    if standing:
        say(f"{plural(len(standing), 'spare node')}: {listed([n.name for n in standing])}")
    return standing


def anywhere(request: Request) -> bool:
    """Tell whether the job could run on a node that had no part in its start."""
    return request.payload is None and request.accelerate is None


@dataclass(frozen=True)
class Latecomers:
    """Gives a part to nodes that were away at the launch, cordoned or not fit, or have lost theirs.

    A head that did not launch the job puts the blueprint together when a node needs it first.
    """

    known: Callable[[], Blueprint]

    @classmethod
    def of(cls, blueprint: Blueprint) -> Latecomers | None:
        """Return them where the job may be started again, and any node can run it."""
        launch = blueprint.request.config.launch
        if not launch.max_restarts or not anywhere(blueprint.request):
            return None
        return cls(lambda: blueprint)

    def reach(self, node: Node) -> tuple[NodeRecord, Reached]:
        """Reach a node, and plan what it would run; nothing is left there."""
        log.debug("%s: reaches it, to see whether it can join", node.name)
        known = self.known()
        request, transport = known.request, known.transport
        settled_node = settled(node, request.config.launch)
        question = probe_of(request, transport, [*(n.node for n in known.nodes), settled_node])
        with marker(request.directory) as path:  # which it sees if it shares this directory
            reached = reach(transport, settled_node, question.replace(marker=path))
        reached = replace(reached, node=replace(settled_node, spare=True))
        try:
            then = reached
            if needs_code(request, reached):  # the directory need not be there
                then = code.at_snapshot(reached, code.expected(request, reached))
            return node_record(known.part_of(then, 0).nodes[0]), reached
        except BaseException:
            reached.channel.connection.close()
            raise

    def stand_by(self, reached: Reached, say: Say) -> NodeRecord:
        """Give a node the code and its part, as a spare has them from the start."""
        log.info("%s: is given the code and its part, to stand by", reached.node.name)
        known = self.known()
        if needs_code(known.request, reached):
            request = code.relative(known.request, [reached], [reached])
            known = replace(known, request=request)
            with known.code() as tree:
                reached = code.bring_late(request, reached, tree, say)
        part = known.part_of(reached)
        reached.channel.ask(known.order(reached, part), STAND_BY_SECONDS)
        return replace(node_record(part.nodes[0]), state="standing by")

    def renew(self, node: NodeRecord, say: Say) -> NodeRecord:
        """Give a node its part anew, which has nothing of it any more."""
        listed = {known.name: known for known in self.known().listed}
        if node.name not in listed:
            raise CheckFailed(f"{node.name} is not in the node list any more")
        _, reached = self.reach(listed[node.name])
        try:
            renewed = self.stand_by(reached, say)
        finally:
            reached.channel.connection.close()
        say(f"{node.name} is given its part of the job again")
        return renewed


def needs_code(request: Request, node: Reached) -> bool:
    """Tell whether a node is to run the job in a snapshot that is made for it."""
    return code.needs_code(request) and code.gets_snapshot(request, node)
