"""Plan a job on the nodes that were reached, with what the user's hook exports on each of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import CheckFailed, OrchestratorError, UsageError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.fleet import Reached
from orchestrator.head.inventory.node_list import Node
from orchestrator.head.inventory.probed_node import ProbedNode
from orchestrator.head.launch.request import Request
from orchestrator.head.plan import nccl_env, plan
from orchestrator.head.plan.accelerate import counted, planned
from orchestrator.head.plan.model import EnvSetting, NodePlan, Plan
from orchestrator.head.plan.plan import Layout
from orchestrator.protocol.messages import Hook

HOOK_TIMEOUT = 70.0


def make_plan(
    request: Request,
    reached: Sequence[Reached],
    spares: Sequence[Node],
    job: str,
    directory: str,
    agreed: Layout | None = None,
) -> Plan:
    """Plan the job, or with `agreed` this machine's part of it (see plan.make)."""
    nodes = [one.probed for one in reached]
    hinted = variables(hook_text(request.config.launch.hook))
    by, config = request.accelerate, request.config
    if by and agreed is None:
        config = counted(config, by, nodes, len(nodes))
    made = plan.make(
        job, directory, request.target, nodes, spares, config, request.env,
        hinted=hinted, agreed=agreed,
    )  # fmt: skip
    made = planned(made, by, nodes, agreed) if by else made
    return warned(apply_hook(request, reached, made), nodes)


def apply_hook(request: Request, reached: Sequence[Reached], made: Plan) -> Plan:
    """Run the hook on every node; what it exports wins over what was computed."""
    text = hook_text(request.config.launch.hook)
    if not text:
        return made

    def run(pair: tuple[Reached, NodePlan]) -> NodePlan:
        one, node = pair
        answer = one.channel.ask(Hook(text=text, env=node.env, workdir=node.workdir), HOOK_TIMEOUT)
        fixed = {s.name for s in node.settings if s.why in ("identifies the node", "--env")}
        new = [
            EnvSetting(name, value, "the hook", yours=True)
            for name, value in answer.env.items()
            if name not in fixed
        ]
        kept = [s for s in node.settings if s.name not in answer.unset or s.name in fixed]
        unset = tuple(name for name in answer.unset if name not in fixed)
        return replace(node, settings=(*kept, *new), unset=unset)

    results = fleet.everywhere(list(zip(reached, made.nodes, strict=True)), run)
    failed = [
        (one.node, result)
        for one, result in zip(reached, results, strict=True)
        if isinstance(result, OrchestratorError)
    ]
    if failed:
        table = fleet.failure_table(failed, len(reached), f" ({request.config.launch.hook} failed)")
        raise CheckFailed(table + "\nnothing was started")
    nodes = tuple(result for result in results if isinstance(result, NodePlan))
    return replace(made, nodes=nodes)


def warned(made: Plan, probed: Sequence[ProbedNode]) -> Plan:
    """Warn of an interface that NCCL will not find, now that the hook has been applied too."""
    notes = []
    for one, node in zip(probed, made.nodes, strict=True):
        for setting in node.settings:
            name, value = setting.name, setting.value
            decides = setting.yours and node.env.get(name) == value
            if name == "NCCL_SOCKET_IFNAME" and decides and nccl_env.unmatched(value, one):
                has = ", ".join(sorted({address.interface for address in one.facts.addresses}))
                words = f"{name}={value} ({setting.why}) fits no interface of {one.name}: {has}"
                notes.append(f"WARNING: {words}")
    return replace(made, notes=(*made.notes, *notes))


def hook_text(path: str | None) -> str:
    """Read the hook; one that has only comments is empty, and needs no shell on every node."""
    if path is None:
        return ""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"the hook {path} cannot be read: {error.strerror}") from error
    lines = (line.strip() for line in text.splitlines())
    return text if any(line and not line.startswith("#") for line in lines) else ""


def variables(text: str) -> frozenset[str]:
    """List the variables that a hook names before it is run; it may set them on some nodes."""
    return frozenset(re.findall(r"\bNCCL_[A-Z_]+", text))
