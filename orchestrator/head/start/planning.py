"""Plan a job on the nodes that were reached, and say what each node's supervisor has to know."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.common import interrupt, logs
from orchestrator.common.errors import OrchestratorError
from orchestrator.common.text import parse_seconds
from orchestrator.config import load
from orchestrator.config.launch import Launch
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan import accelerate, plan, user_network
from orchestrator.head.plan.model import Plan
from orchestrator.head.plan.plan import Layout
from orchestrator.head.start import payload, selection
from orchestrator.head.start.nodes import ListedNodes, Nodes
from orchestrator.head.start.request import Request
from orchestrator.head.start.variables import hook
from orchestrator.protocol.spec import Attempt, LeaseTerms, Spec, Target
from orchestrator.protocol.timing import START_PATIENCE_SECONDS
from orchestrator.records.experiment import Experiment
from orchestrator.records.experiments import check_name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A job that can be started: its nodes, its directory, and what each node will run."""

    request: Request
    nodes: Nodes
    experiment: Experiment
    plan: Plan
    times: dict[str, float] = field(default_factory=dict)  # when each step of the start was done


def prepare(request: Request, nodes: Nodes, *, dry_run: bool = False) -> Prepared:
    """Make the experiment's directory and plan the job; a dry run makes no directory."""
    now = time.time()
    times = {"begin": request.begun, "reached": nodes.at or now, "synced": now}
    if not isinstance(nodes.source, ListedNodes):
        request = without_claims(request)
    nodes = selection.choose(request, nodes, hold=not dry_run)
    if request.payload is not None:
        payload.check_python(nodes.probed)
    root, name = request.where.experiments, request.config.launch.name
    if dry_run:
        check_name(name)
        job = f"{name}_dry-run"
        experiment = Experiment(root.absolute() / job)
    else:
        interrupt.hold()
        experiment = nodes.source.experiment(root, name)
        interrupt.undo_with(experiment.discard)  # until the job is recorded
        interrupt.answer_now()
        logs.keep_in(experiment.head_log)
        job = f"{experiment.name}-{secrets.token_hex(3)}"
        log.info("plans job %s in %s", job, experiment.path)
    with contextlib.nullcontext() if dry_run else discarded_on_error(experiment):
        plan = make_plan(request, nodes, job, str(experiment.path))
    return Prepared(request, nodes, experiment, plan, {**times, "planned": time.time()})


def without_claims(request: Request) -> Request:
    """Return a launch on nodes that a scheduler has given to this job alone.

    What numbers GPUs have there is its own matter.
    """
    launch = replace(request.config.launch, claim="none", queue=False)
    return replace(request, config=replace(request.config, launch=launch))


@contextlib.contextmanager
def discarded_on_error(experiment: Experiment) -> Iterator[None]:
    """Remove the directory of a job that cannot be started."""
    try:
        yield
    except OrchestratorError as error:
        log.info("nothing is started: %s", error)
        experiment.discard()
        raise


# -- the plan ---------------------------------------------------------------------------------


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
    most = max(node.nproc for node in planned.nodes)
    file = Path(request.target.name)
    own = config.launch.no_torchrun  # to start ranks by itself is what it is for
    warning = "" if own else plan.warning(file, planned.nodes[0].target.kind, most)
    notes = [*request.notes, *nodes.notes, *planned.notes, *([warning] if warning else [])]
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


@dataclass(frozen=True)
class Meeting:
    """The address where the supervisors of a job meet, and the secret that they share."""

    address: str
    port: int
    token: str


def patience(launch: Launch) -> float:
    """Return for how long a node may take to start its part: as long as to answer at all."""
    return max(START_PATIENCE_SECONDS, launch.connect_timeout)


def specs(request: Request, plan: Plan, meeting: Meeting) -> list[Spec]:
    """Return the specs of all nodes of the plan, in order."""
    launch, config = request.config.launch, load.as_data(request.config)
    lease = lease_terms(launch, meeting, attached=not request.detached)
    most = launch.max_restarts
    # Told to each of 1,024 nodes, they are 14 MB.
    hosts = tuple(each.address for each in plan.nodes) if launch.ranks_know_hosts else ()
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
            rank_env=launch.variables_of_ranks,
            numa_binding=launch.numa_binding == "node",
            hosts=hosts,
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
            config=config,
            wish=node.wish,
            lease=lease,
            prolog=launch.prolog or "",
            epilog=launch.epilog or "",
            prolog_timeout=launch.prolog_timeout,
            patience=patience(launch),
            attempt=first_attempt(node.index, plan, most) if most else None,
        )
        for node in plan.nodes
    ]


def lease_terms(launch: Launch, meeting: Meeting, *, attached: bool) -> LeaseTerms:
    return LeaseTerms(
        address=meeting.address,
        port=meeting.port,
        token=meeting.token,
        seconds=launch.node_loss_timeout,
        wait=launch.on_node_loss == "wait",
        head=launch.on_head_loss,
        attached=attached,
        grace=launch.grace,
        limit=parse_seconds("--time-limit", launch.time_limit) if launch.time_limit else 0.0,
    )


def first_attempt(node: int, plan: Plan, restarts: int) -> Attempt:
    """Describe the attempt that a launch begins with, for one of its nodes."""
    ranks = plan.world_size
    return Attempt(number=1, restarts=restarts, first_job=plan.job, first_node=node, ranks=ranks)
