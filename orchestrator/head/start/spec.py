"""Turn a plan into what each node's supervisor has to know. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.text import parse_seconds
from orchestrator.config import load
from orchestrator.head.plan.model import Plan
from orchestrator.head.start.request import Request
from orchestrator.protocol.spec import Attempt, LeaseTerms, Spec, Target


@dataclass(frozen=True)
class Meeting:
    """The address where the supervisors of a job meet, and the secret that they share."""

    address: str
    port: int
    token: str


def specs(request: Request, plan: Plan, meeting: Meeting) -> list[Spec]:
    """Return the specs of all nodes of the plan, in order."""
    launch, config = request.config.launch, load.as_data(request.config)
    lease = LeaseTerms(
        address=meeting.address,
        port=meeting.port,
        token=meeting.token,
        seconds=launch.node_loss_timeout,
        wait=launch.on_node_loss == "wait",
        head=launch.on_head_loss,
        attached=not request.detached,
        grace=launch.grace,
    )
    most = launch.max_restarts
    return [
        Spec(
            job=plan.job,
            node=node.index,
            nnodes=int(node.env["NNODES"]),
            experiment=Path(node.env["ORCHESTRATOR_EXPERIMENT"]).name,
            nproc=node.nproc,
            first_rank=node.first_rank,
            start=plan.start,
            warm=parse_seconds("--warm", launch.warm) if launch.warm else 0.0,
            fresh=request.fresh,
            agent=tuple(node.agent),
            files=tuple(node.files),
            env=node.env,
            unset=tuple(node.unset),
            secrets=tuple(setting.name for setting in node.settings if setting.secret),
            workdir=node.workdir,
            target=Target(kind=node.target.kind, name=node.target.name, args=node.target.args),
            config=config,
            lease=lease,
            port=0 if node.index else plan.master_port,
            attempt=first_attempt(node.index, plan, most) if most else None,
        )
        for node in plan.nodes
    ]


def first_attempt(node: int, plan: Plan, restarts: int) -> Attempt:
    """Describe the attempt that a launch begins with, for one of its nodes."""
    ranks = plan.world_size
    return Attempt(number=1, restarts=restarts, first_job=plan.job, first_node=node, ranks=ranks)
