"""Build the plan of a launch, and from it each node's job spec and its placement in an attempt.

A spec stays the same from one attempt to the next. A placement is new in each attempt.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.common import hiding
from orchestrator.common.errors import CheckFailed, NodeError
from orchestrator.common.text import parse_seconds
from orchestrator.config.launch import Launch
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan import accelerate, nccl_env, plan
from orchestrator.head.plan.model import EnvSetting, Layout, NodePlan, Plan
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.head.start.nodes import Nodes
from orchestrator.protocol.requests.start import Hook, Hooked, TakenPorts
from orchestrator.protocol.spec import Placement, Spec
from orchestrator.protocol.timing import HOOK_ANSWER_SECONDS, START_PATIENCE_SECONDS
from orchestrator.records.experiment import Experiment, JobRecord

log = logging.getLogger(__name__)

SHORTEST_LIMIT_SECONDS = 1.0


@dataclass(frozen=True)
class Prepared:
    """A job that can be started: its nodes, its directory, and what each node will run."""

    request: LaunchRequest
    nodes: Nodes
    experiment: Experiment
    plan: Plan
    # The time at which each step of the start was done.
    times: dict[str, float] = field(default_factory=dict)


def make_plan(
    request: LaunchRequest, nodes: Nodes, job: str, directory: str, agreed: Layout | None = None
) -> Plan:
    """Plan the job, or with `agreed` this machine's part of it (see plan.plan_job).

    Nothing is asked of a node, and nothing is changed.
    """
    log.info("plans job %s in %s", job, directory)
    probed, by = nodes.probed, request.accelerate
    if by and agreed is None:
        config = accelerate.count_ranks(request.config, by, probed, len(probed))
        request = replace(request, config=config)
    planned = plan.plan_job(request, probed, job, directory, agreed)
    if by:
        planned = accelerate.plan_accelerate(planned, by, probed, agreed)
    notes = (*request.notes, *nodes.notes, *planned.notes)
    spares = tuple(spare.node.name for spare in nodes.spares)
    return replace(planned, spares=spares, notes=notes)


def run_hook(planned: Plan, nodes: Nodes, request: LaunchRequest) -> Plan:
    """Run the hook on the nodes; return the plan with its exports, and warnings on variables."""
    return plan_with_warnings(after_hook(planned, nodes.reached, request), nodes.probed)


def spare_plan(prepared: Prepared, node: Reached, index: int) -> NodePlan:
    """Plan a spare as if it were the job's last node; a later attempt decides its placement."""
    request, port = prepared.request, prepared.plan.master_port
    known = (*prepared.nodes.probed[:-1], node.probed)
    asked = [replace(one, facts=one.facts.replace(port=port)) for one in known]
    planned = plan.plan_job(request, asked, prepared.plan.job, str(prepared.experiment.path))
    planned = replace(planned, nodes=(replace(planned.nodes[-1], index=index),))
    return after_hook(planned, [node], request).nodes[0]


def plan_with_warnings(planned: Plan, probed: Sequence[ProbedNode]) -> Plan:
    """Return the plan with warnings on variables that match no device or that nothing reads."""
    notes = nccl_env.setting_warnings(zip(probed, planned.nodes, strict=True))
    environments = [machine.facts.environment for machine in probed]
    if any("NCCL_TIMEOUT" in env for env in (*environments, *(node.env for node in planned.nodes))):
        notes.append(
            "WARNING: nothing reads NCCL_TIMEOUT: set distributed.timeout for the engine, or"
            " timeout= of setup_distributed or init_process_group"
        )
    return replace(planned, notes=(*planned.notes, *notes))


def after_hook(plan: Plan, reached: Sequence[Reached], request: LaunchRequest) -> Plan:
    """Run the hook on these nodes; return the plan with its exports, which override the plan's."""
    if not request.hook:
        return plan
    log.info("runs the hook on %d nodes", len(plan.nodes))
    hooks = [Hook(text=request.hook, env=node.env, workdir=node.workdir) for node in plan.nodes]
    why = f" ({request.config.launch.hook} failed)"
    try:
        answers = fleet.ask_all(reached, hooks, HOOK_ANSWER_SECONDS, why)
    except NodeError as error:
        what = hiding.hide_secrets(error.what, request.secrets)
        raise CheckFailed(f"{what}\nnothing was started") from error
    return replace(plan, nodes=tuple(map(node_after_hook, plan.nodes, answers)))


def node_after_hook(node: NodePlan, answer: Hooked) -> NodePlan:
    """Return the node with its hook's variables, except the node's identity and typed options."""
    fixed = {s.name for s in node.settings if s.why.startswith(("identifies the node", "--"))}
    new = [
        EnvSetting(name, value, "the hook", yours=True)
        for name, value in answer.env.items()
        if name not in fixed
    ]
    kept = [s for s in node.settings if s.name not in answer.unset or s.name in fixed]
    unset = tuple(name for name in answer.unset if name not in fixed)
    return replace(node, settings=(*kept, *new), unset=unset)


# -- for the supervisors ----------------------------------------------------------------------


def start_patience(launch: Launch) -> float:
    """Return the seconds that a node may take to start its part: at least the connect timeout."""
    return max(START_PATIENCE_SECONDS, launch.connect_timeout)


def spec_of_node(request: LaunchRequest, plan: Plan, node: NodePlan, place: Placement) -> Spec:
    """Return a node's job spec, at its place in the first attempt."""
    launch = request.config.launch
    return Spec(
        **vars(place),
        experiment=Path(node.env["ORCHESTRATOR_EXPERIMENT"]).name,
        nproc=node.nproc,
        start=plan.start,
        warm=parse_seconds("--warm", launch.warm) if launch.warm else 0.0,
        rank_env=launch.variables_of_ranks,
        agent=node.agent,
        placed=node.placed,
        files=tuple(node.files),
        env=node.env,
        unset=tuple(node.unset),
        secrets=tuple(setting.name for setting in node.settings if setting.secret),
        workdir=node.workdir,
        target=node.target,
        config=request.config_data,
        devices=node.devices,
        lease_seconds=launch.node_loss_timeout,
        attached=not request.detached,
        grace=launch.grace,
        patience=start_patience(launch),
        memory_floor=launch.memory_floor,
    )


def first_placement(starting: JobRecord, address: str, ports: TakenPorts) -> Placement:
    """Return the first node's placement, with the master ports of ranks and supervisors."""
    return Placement(
        job=starting.job,
        node=0,
        nnodes=starting.part_of or len(starting.nodes),
        first_rank=0,
        master=address,
        port=ports.port,
        supervisors=address,
        supervisors_port=ports.peers_port,
        token=secrets.token_hex(32),
    )


def placements_of_attempt(starting: JobRecord, first: Placement, ranks: int) -> list[Placement]:
    """Return the placements of an attempt; `ranks` is the number of ranks in the first attempt."""
    limit = left_of(starting)
    known = starting.nodes if "slurm" in starting.launch.variables_of_ranks else ()
    hosts = tuple(node.address for node in known)
    return [
        first.replace(
            node=node.index,
            first_rank=node.first_rank,
            hosts=hosts,
            limit=limit,
            part=node.part,
            attempt=starting.attempt,
            restarts=starting.launch.max_restarts,
            log_before=node.log_before,
            first_ranks=ranks,
        )
        for node in starting.nodes
    ]


def left_of(starting: JobRecord) -> float:
    """Return the seconds that are left of the job's time limit, 0 if it has none."""
    written = starting.launch.time_limit
    limit = parse_seconds("--time-limit", written) if written else 0.0
    if not limit or not starting.attempts:
        return limit
    return max(SHORTEST_LIMIT_SECONDS, limit + starting.attempts[0].started - time.time())
