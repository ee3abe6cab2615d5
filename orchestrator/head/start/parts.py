"""Turn a launch into what its nodes are sent: the plan, each node's part, its place in an attempt.

A part is all that stays the same from one attempt to the next. A place is the rest.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.common.text import parse_seconds
from orchestrator.config import load
from orchestrator.config.launch import Launch
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan import accelerate, plan, user_network
from orchestrator.head.plan.model import NodePlan, Plan
from orchestrator.head.plan.plan import Layout
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.request import Request
from orchestrator.head.start.variables import hook
from orchestrator.protocol.requests.start import TakenPorts
from orchestrator.protocol.spec import Attempt, LeaseTerms, Placement, Spec, Target
from orchestrator.protocol.timing import START_PATIENCE_SECONDS
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

log = logging.getLogger(__name__)

SHORTEST_LIMIT_SECONDS = 1.0


@dataclass(frozen=True)
class Prepared:
    """A job that can be started: its nodes, its directory, and what each node will run."""

    request: Request
    nodes: Nodes
    experiment: Experiment
    plan: Plan
    times: dict[str, float] = field(default_factory=dict)  # when each step of the start was done


def make_plan(
    request: Request, nodes: Nodes, job: str, directory: str, agreed: Layout | None = None
) -> Plan:
    """Plan the job, or with `agreed` this machine's part of it (see plan.make)."""
    probed, config, by = nodes.probed, request.config, request.accelerate
    if by and agreed is None:
        config = accelerate.counted(config, by, probed, len(probed))
    planned = plan.make(
        job, directory, request.target, probed, [node.node for node in nodes.spares], config,
        request.env,
        hinted=hook.variables(request.hook), agreed=agreed,
    )  # fmt: skip
    if by:
        planned = accelerate.planned(planned, by, probed, agreed)
    if request.hook:
        log.info("runs the hook on %d nodes", len(planned.nodes))
        path = config.launch.hook
        planned = hook.run(planned, nodes.reached, request.hook, path, request.secrets)
    notes = [*request.notes, *nodes.notes, *planned.notes]
    return warned(replace(planned, notes=tuple(notes)), probed)


def warned(planned: Plan, probed: Sequence[ProbedNode]) -> Plan:
    """Warn of variables that fit nothing on a node, or that nothing reads, after the hook."""
    notes = user_network.warnings(zip(probed, planned.nodes, strict=True))
    environments = [machine.facts.environment for machine in probed]
    if any("NCCL_TIMEOUT" in env for env in (*environments, *(node.env for node in planned.nodes))):
        notes.append(
            "WARNING: nothing reads NCCL_TIMEOUT: set distributed.timeout for the engine, or"
            " timeout= of setup_distributed or init_process_group"
        )
    return replace(planned, notes=(*planned.notes, *notes))


# -- for the supervisors ----------------------------------------------------------------------


def patience(launch: Launch) -> float:
    """Return for how long a node may take to start its part: as long as to answer at all."""
    return max(START_PATIENCE_SECONDS, launch.connect_timeout)


def part(request: Request, plan: Plan, node: NodePlan) -> Spec:
    """Return a node's part of the job; `places` says where it is among the others."""
    launch = request.config.launch
    return Spec(
        job=plan.job,
        node=node.index,
        nnodes=int(node.env["NNODES"]),
        experiment=Path(node.env["ORCHESTRATOR_EXPERIMENT"]).name,
        nproc=node.nproc,
        first_rank=node.first_rank,
        start=plan.start,
        warm=parse_seconds("--warm", launch.warm) if launch.warm else 0.0,
        rank_env=launch.variables_of_ranks,
        agent=node.agent,
        placed=node.placed,
        master=plan.master_address,
        port=plan.master_port,
        files=tuple(node.files),
        env=node.env,
        unset=tuple(node.unset),
        secrets=tuple(setting.name for setting in node.settings if setting.secret),
        workdir=node.workdir,
        target=Target(kind=node.target.kind, name=node.target.name, args=node.target.args),
        config=load.as_data(request.config),
        wish=node.wish,
        lease=LeaseTerms(
            seconds=launch.node_loss_timeout,
            attached=not request.detached,
            grace=launch.grace,
        ),
        patience=patience(launch),
        attempt=first_attempt(plan, node, launch.max_restarts),
    )


def first_attempt(plan: Plan, node: NodePlan, restarts: int) -> Attempt | None:
    """Describe the attempt that a launch begins with, for one of its nodes."""
    if not restarts:
        return None
    ranks = plan.world_size
    return Attempt(
        number=1, restarts=restarts, first_job=plan.job, first_node=node.index, ranks=ranks
    )


@dataclass(frozen=True)
class Meeting:
    """The addresses where the ranks and the supervisors of an attempt meet, and their secret."""

    master: str
    supervisors: str  # The same, but never a name: supervisors ask no name server.
    ports: TakenPorts
    token: str = field(default_factory=lambda: secrets.token_hex(32))


def places(starting: JobRecord, meeting: Meeting, ranks: int) -> list[Placement]:
    """Return the place of each node in an attempt of a job that began with so many ranks."""
    limit = left_of(starting)
    known = starting.nodes if starting.launch.ranks_know_hosts else ()
    hosts = tuple(node.address for node in known)
    number, restarts = len(starting.attempts) + 1, starting.launch.max_restarts

    def attempt(node: NodeRecord) -> Attempt:
        job, index = starting.first_part(node)
        return Attempt(
            number=number,
            restarts=restarts,
            first_job=job,
            first_node=index,
            log=node.log_before,
            ranks=ranks,
        )

    return [
        Placement(
            job=starting.job,
            node=node.index,
            nnodes=starting.part_of or len(starting.nodes),
            first_rank=node.first_rank,
            master=meeting.master,
            port=meeting.ports.port,
            supervisors=meeting.supervisors,
            supervisors_port=meeting.ports.peers_port,
            token=meeting.token,
            hosts=hosts,
            limit=limit,
            attempt=attempt(node) if restarts else None,
        )
        for node in starting.nodes
    ]


def left_of(starting: JobRecord) -> float:
    """Return the seconds that are left of the job's time limit; 0 where it has none."""
    written = starting.launch.time_limit
    limit = parse_seconds("--time-limit", written) if written else 0.0
    if not limit or not starting.attempts:
        return limit
    return max(SHORTEST_LIMIT_SECONDS, limit + starting.attempts[0].started - time.time())
