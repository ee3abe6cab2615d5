"""Plan a job on the nodes that were reached, with what the user's hook exports on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.head.inventory.probed_node import ProbedNode
from orchestrator.head.launch import hook
from orchestrator.head.launch.nodes import Nodes
from orchestrator.head.launch.request import Request
from orchestrator.head.plan import accelerate, nccl_env, plan
from orchestrator.head.plan.model import Plan
from orchestrator.head.plan.plan import Layout


def make_plan(
    request: Request, nodes: Nodes, job: str, directory: str, agreed: Layout | None = None
) -> Plan:
    """Plan the job, or with `agreed` this machine's part of it (see plan.make)."""
    probed, config, by = nodes.probed, request.config, request.accelerate
    hook_text = hook.read(config.launch.hook)
    if by and agreed is None:
        config = accelerate.counted(config, by, probed, len(probed))
    planned = plan.make(
        job, directory, request.target, probed, nodes.spares, config, request.env,
        hinted=hook.variables(hook_text), agreed=agreed,
    )  # fmt: skip
    if by:
        planned = accelerate.planned(planned, by, probed, agreed)
    if hook_text:
        planned = hook.run(planned, nodes, hook_text, config.launch.hook)
    planned = replace(planned, notes=(*request.notes, *planned.notes))
    return warned(planned, probed)


def warned(planned: Plan, probed: Sequence[ProbedNode]) -> Plan:
    """Warn of an interface that NCCL will not find, now that the hook has been applied too."""
    notes = []
    for machine, node in zip(probed, planned.nodes, strict=True):
        for setting in node.settings:
            name, value = setting.name, setting.value
            decides = setting.yours and node.env.get(name) == value
            if name == "NCCL_SOCKET_IFNAME" and decides and nccl_env.unmatched(value, machine):
                has = ", ".join(sorted({item.interface for item in machine.facts.addresses}))
                problem = f"{name}={value} ({setting.why}) fits no interface of {machine.name}"
                notes.append(f"WARNING: {problem}: {has}")
    return replace(planned, notes=(*planned.notes, *notes))
