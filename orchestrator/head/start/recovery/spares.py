"""Give spare nodes their part of a job that may be started again.

Only the launch can: no record has the values of secrets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.common.hosts import listed
from orchestrator.common.text import plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.plan import plan
from orchestrator.head.plan.model import NodePlan
from orchestrator.head.screen import failures
from orchestrator.head.screen.output import say
from orchestrator.head.start.parts import Prepared, part
from orchestrator.head.start.record import node_record
from orchestrator.head.start.variables import hook
from orchestrator.protocol.requests.start import Start
from orchestrator.protocol.timing import ANSWER_SECONDS
from orchestrator.records.experiment import NodeRecord


def stand_by(prepared: Prepared, spares: Sequence[Reached]) -> list[NodeRecord]:
    """Send each spare its part if the job may be started again; return those that have it."""
    request = prepared.request
    if not (request.config.launch.max_restarts and spares):
        return []
    if request.payload is not None or request.accelerate is not None:
        say("the spares are of no use to this job: what it runs is on its own nodes only")
        return []

    def give(numbered: tuple[int, Reached]) -> NodeRecord:
        index, spare = numbered
        planned = plan_for(prepared, spare, index)
        order = Start(spec=part(request, prepared.plan, planned), later=True)
        spare.channel.ask(order, ANSWER_SECONDS)
        return replace(node_record(planned), state="standing by")

    results = fleet.everywhere(list(enumerate(spares, len(prepared.plan.nodes))), give)
    for node, error in failures.failures([spare.node for spare in spares], results):
        say(f"{node.name} cannot stand by: {error.what}")
    standing = [result for result in results if isinstance(result, NodeRecord)]
    if standing:
        say(f"{plural(len(standing), 'spare node')}: {listed([n.name for n in standing])}")
    return standing


def plan_for(prepared: Prepared, node: Reached, index: int) -> NodePlan:
    """Plan the job as if the node were its last; its place is decided by an attempt."""
    request, port = prepared.request, prepared.plan.master_port
    known = (*prepared.nodes.probed[:-1], node.probed)
    probed = [replace(one, facts=one.facts.replace(port=port)) for one in known]
    planned = plan.make(
        prepared.plan.job,
        str(prepared.experiment.path),
        request.target,
        probed,
        (),
        request.config,
        request.env,
        hinted=hook.variables(request.hook),
    )
    planned = replace(planned, nodes=(replace(planned.nodes[-1], index=index),))
    if request.hook:
        path = request.config.launch.hook
        planned = hook.run(planned, [node], request.hook, path, request.secrets)
    return planned.nodes[0]
