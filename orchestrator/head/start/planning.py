"""Plan a job on the nodes that were reached, with what the user's hook exports on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan import accelerate, nccl_env, plan
from orchestrator.head.plan.model import Plan
from orchestrator.head.plan.plan import Layout
from orchestrator.head.start import hook
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.request import Request


def make_plan(
    request: Request, nodes: Nodes, job: str, directory: str, agreed: Layout | None = None
) -> Plan:
    """Plan the job, or with `agreed` this machine's part of it (see plan.make)."""
    probed, config, by = nodes.probed, request.config, request.accelerate
    hook_text = hook.read(config.launch.hook)
    if by and agreed is None:
        config = accelerate.counted(config, by, probed, len(probed))
    planned = plan.make(
        job, directory, request.target, probed, [node.node for node in nodes.spares], config,
        request.env,
        hinted=hook.variables(hook_text), agreed=agreed,
    )  # fmt: skip
    if by:
        planned = accelerate.planned(planned, by, probed, agreed)
    if hook_text:
        planned = hook.run(planned, nodes, hook_text, config.launch.hook, request.secrets)
    most = max(node.nproc for node in planned.nodes)
    file = Path(request.target.name)
    own = plan.warning(file, planned.nodes[0].target.kind, most)
    notes = [*request.notes, *nodes.notes, *planned.notes, *([own] if own else [])]
    return warned(replace(planned, notes=tuple(notes)), probed)


def warned(planned: Plan, probed: Sequence[ProbedNode]) -> Plan:
    """Warn of interfaces that do not exist and of a variable that nothing reads, after the hook."""
    notes = []
    for machine, node in zip(probed, planned.nodes, strict=True):
        for setting in node.settings:
            name, value = setting.name, setting.value
            decides = setting.yours and node.env.get(name) == value
            if decides and nccl_env.is_unmatched(name, value, machine):
                has = ", ".join(sorted({item.interface for item in machine.facts.addresses}))
                problem = f"{name}={value} ({setting.why}) fits no interface of {machine.name}"
                notes.append(f"WARNING: {problem}: {has}")
    given = [machine.facts.environment for machine in probed]
    if any("NCCL_TIMEOUT" in env for env in (*given, *(node.env for node in planned.nodes))):
        notes.append(
            "WARNING: nothing reads NCCL_TIMEOUT: set distributed.timeout for the engine, or"
            " timeout= of setup_distributed or init_process_group"
        )
    return replace(planned, notes=(*planned.notes, *notes))
