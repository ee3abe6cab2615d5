"""Give a part of the job to nodes that may need one later: spares, and those with a new disk.

Only the head that launched the job can: no record has the values of secrets.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from orchestrator.common.errors import CheckFailed, OrchestratorError
from orchestrator.common.hosts import listed
from orchestrator.common.text import plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached, reach
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.plan import plan
from orchestrator.head.plan.model import NodePlan, Plan
from orchestrator.head.screen.output import say
from orchestrator.head.start import code
from orchestrator.head.start.nodes import probe_of, settled
from orchestrator.head.start.parts import Prepared, part
from orchestrator.head.start.record import node_record
from orchestrator.head.start.request import Request
from orchestrator.head.start.variables import hook
from orchestrator.head.transfer.code import archive
from orchestrator.head.transfer.code.shared import marker
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.requests.start import Start
from orchestrator.protocol.timing import ANSWER_SECONDS
from orchestrator.records import manifest as manifests
from orchestrator.records.experiment import NodeRecord

log = logging.getLogger(__name__)


class Parts:
    """Makes further parts of a job of what its launch has fixed for all nodes."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.numbers = itertools.count(len(prepared.plan.nodes))

    @property
    def may_be_needed(self) -> bool:
        """Return True if the job may be started again, and any node can run it."""
        request = self.prepared.request
        anywhere = request.payload is None and request.accelerate is None
        return bool(request.config.launch.max_restarts) and anywhere

    def keep(self, spares: Sequence[Reached]) -> list[NodeRecord]:
        """Send each spare its part if the job may be started again; return those that have it."""
        try:
            return self.stand_by(spares)
        finally:
            for spare in spares:
                spare.channel.connection.close()

    def stand_by(self, spares: Sequence[Reached]) -> list[NodeRecord]:
        if not (self.prepared.request.config.launch.max_restarts and spares):
            return []
        if not self.may_be_needed:
            say("the spares are of no use to this job: what it runs is on its own nodes only")
            return []
        able, parts, orders = list[Reached](), list[NodePlan](), list[Start]()
        for spare in spares:
            try:
                planned = self.plan_for(spare)
                orders.append(self.order(spare, planned))
                parts.append(planned.nodes[0])
                able.append(spare)
            except OrchestratorError as error:
                say(f"{spare.node.name} cannot stand by: {error.what}")
        answers = fleet.ask(able, orders, ANSWER_SECONDS)
        standing = []
        for each, spare, answer in zip(parts, able, answers, strict=True):
            if isinstance(answer, OrchestratorError):
                say(f"{spare.node.name} cannot stand by: {answer.what}")
            else:
                standing.append(replace(node_record(each), state="standing by"))
        if standing:
            say(f"{plural(len(standing), 'spare node')}: {listed([n.name for n in standing])}")
        return standing

    def plan_for(self, node: Reached) -> Plan:
        """Plan the job as if the node were its last; its place is decided by an attempt."""
        request, known = self.prepared.request, self.prepared.nodes.probed
        port = self.prepared.plan.master_port
        probed = [
            replace(one, facts=one.facts.replace(port=port)) for one in (*known[:-1], node.probed)
        ]
        planned = plan.make(
            self.prepared.plan.job,
            str(self.prepared.experiment.path),
            request.target,
            probed,
            (),
            request.config,
            request.env,
            hinted=hook.variables(request.hook),
        )
        return replace(planned, nodes=(replace(planned.nodes[-1], index=next(self.numbers)),))

    def order(self, node: Reached, planned: Plan) -> Start:
        """Return what gives the node its part, once its hook was run there."""
        request = self.prepared.request
        if request.hook:
            path = request.config.launch.hook
            planned = hook.run(planned, [node], request.hook, path, request.secrets)
        return Start(spec=part(request, planned, planned.nodes[0]), later=True)

    # -- a node that has lost its part ------------------------------------------------------------

    def renew(self, node: NodeRecord) -> NodeRecord:
        """Send the code and its part again to a node that has lost them."""
        known = {each.name: each for each in self.prepared.nodes.source.nodes}
        if node.name not in known:
            raise CheckFailed(f"{node.name} is not in the node list any more")
        log.info("%s: is given the code and its part", node.name)
        reached = self.reach(known[node.name])
        try:
            reached = self.with_code(reached)
            planned = self.plan_for(reached)
            reached.channel.ask(self.order(reached, planned), ANSWER_SECONDS)
        finally:
            reached.channel.connection.close()
        say(f"{node.name} is given its part of the job again")
        return replace(node_record(planned.nodes[0]), state="standing by")

    def reach(self, node: Node) -> Reached:
        request, transport = self.prepared.request, self.prepared.nodes.transport
        asked = settled(node, request.config.launch)
        active = [*(one.node for one in self.prepared.nodes.reached), asked]
        question = probe_of(request, transport, active)
        with marker(request.directory) as path:  # which it sees if it shares this directory
            reached = reach(transport, asked, question.replace(marker=path))
        return replace(reached, node=replace(asked, spare=True))

    def with_code(self, reached: Reached) -> Reached:
        """Send a node its snapshot if the job runs in one there."""
        request = self.prepared.request
        if not (code.needs_code(request) and code.gets_snapshot(request, reached)):
            return reached
        request = code.relative(request, [reached], [reached])
        with self.code_of_job(request) as tree:
            return code.bring_late(request, reached, tree)

    @contextlib.contextmanager
    def code_of_job(self, request: Request) -> Iterator[Tree]:
        """Yield the code that the job runs, whatever its directory holds by now."""
        experiment, scan = self.prepared.experiment, self.prepared.nodes.scan
        digest = str(manifests.read(experiment).get("tree") or "")
        kept, directory = experiment.path / archive.NAME, request.directory
        if digest and kept.is_file():
            with archive.unpacked(kept, digest, directory.name) as tree:
                yield tree
        elif scan is not None or digest:
            tree = code.tree_for(request, scan or code.begin_scan(request))
            if digest and tree.digest != digest:
                raise CheckFailed(
                    f"the code of {experiment.name} was not kept, being larger than sync.keep,"
                    f" and {directory} holds other code by now",
                    "put that back; for later jobs: --set sync.keep=MEGABYTES",
                )
            yield tree
        else:
            raise CheckFailed("it does not share the directory that the others run in")
