"""Start a job: reach the nodes, plan, record, start the supervisors on all of them or on none."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator import interrupt
from orchestrator.config import load
from orchestrator.errors import NodeError, OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.fleet import Reached
from orchestrator.head.connect.transport import Transport
from orchestrator.head.launch import nodes, payload, preflight, redact
from orchestrator.head.launch.planning import make_plan
from orchestrator.head.launch.record import not_started, record_job, write_manifest
from orchestrator.head.launch.request import Request
from orchestrator.head.plan.model import NodePlan, Plan
from orchestrator.protocol.messages import End, Start, StartedHere
from orchestrator.protocol.spec import LeaseTerms, Spec, Target
from orchestrator.records.experiment import Experiment, JobRecord

START_TIMEOUT = 30.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Launched:
    """A job that runs on all nodes now, with open channels to them."""

    experiment: Experiment
    record: JobRecord
    transport: Transport
    reached: tuple[Reached, ...]


def launch(request: Request, say: Say) -> Launched:
    """Start the job on every node, or on none."""
    everybody = nodes.reach_all(request, needed=True)
    reached, source = everybody.reached, everybody.source
    if request.payload is not None:
        payload.check_python(reached)
    interrupt.hold()
    place = source.experiment(request.where.experiments, request.config.launch.name)
    interrupt.undo_with(place.discard)
    interrupt.answer_now()
    job = f"{place.name}-{secrets.token_hex(3)}"
    try:
        made = make_plan(request, reached, everybody.spares, job, str(place.path))
        preflight.check(request, reached, say)
    except OrchestratorError:
        place.discard()
        raise
    record = record_job(redact.without_secrets(request), source, made, place)
    terms = lease(request, made, reached[0].facts.peers_port or 0, secrets.token_hex(32))
    record = start_job(request, reached, made, place, record, terms, say)
    return Launched(place, record, everybody.transport, tuple(reached))


def start_job(
    request: Request,
    reached: Sequence[Reached],
    made: Plan,
    place: Experiment,
    record: JobRecord,
    terms: LeaseTerms,
    say: Say,
) -> JobRecord:
    """Start a job that was written down, on the nodes of the plan."""
    announce(made, place, say)
    try:
        if request.payload is not None:
            payload.deliver(reached, made, request.payload)
        start(request, reached, made, terms)
    except OrchestratorError as error:
        with contextlib.suppress(OSError):  # a full disk must not hide why it did not start
            place.write_record(not_started(record, error))
        raise
    finally:  # not before the start: git alone takes 10 ms, and seconds in a large tree
        problem = write_manifest(request, reached, made, place)
        if problem:
            say(problem)
    return record


def announce(made: Plan, place: Experiment, say: Say) -> None:
    for note in made.notes:
        say(note)
    node, master = made.nodes[0], f"master {made.master_address}:{made.master_port}"
    count = int(node.env["NNODES"])
    if len(made.nodes) == count:
        say(f"{count} nodes, {made.world_size} ranks, {master}, {made.start} start")
    else:
        say(
            f"node {node.index} of {count}: ranks {node.first_rank} to {node.last_rank} of"
            f" {made.world_size}, {master}, {made.start} start"
        )
    say(f"logs in {place.logs}")


def start(request: Request, reached: Sequence[Reached], made: Plan, terms: LeaseTerms) -> None:
    """Start the supervisors of all nodes; if one cannot start, end the others again."""

    def begin(pair: tuple[Reached, NodePlan]) -> StartedHere:
        one, node = pair
        spec = Spec(
            job=made.job,
            node=node.index,
            nnodes=int(node.env["NNODES"]),
            experiment=Path(node.env["ORCHESTRATOR_EXPERIMENT"]).name,
            nproc=node.nproc,
            first_rank=node.first_rank,
            start=made.start,
            agent=tuple(node.agent),
            files=tuple(node.files),
            env=node.env,
            unset=tuple(node.unset),
            workdir=node.workdir,
            target=Target(kind=node.target.kind, name=node.target.name, args=node.target.args),
            config=load.as_data(request.config),
            lease=terms,
            port=0 if node.index else made.master_port,
        )
        return one.channel.ask(Start(spec=spec), START_TIMEOUT)

    results = fleet.everywhere(list(zip(reached, made.nodes, strict=True)), begin)
    failed = [
        (one.node, result)
        for one, result in zip(reached, results, strict=True)
        if isinstance(result, OrchestratorError)
    ]
    if not failed:
        return
    for one, node in zip(reached, made.nodes, strict=True):
        try:
            order = End(job=made.job, node=node.index, why="not started", grace=0.0)
            one.channel.ask(order, 10.0)
        except NodeError:
            continue  # it is among the failed already
    raise NodeError(fleet.failure_table(failed, len(reached), "; the others were ended again"))


def lease(request: Request, made: Plan, port: int, token: str) -> LeaseTerms:
    """Return how the supervisors of this job find each other, and when they end it themselves."""
    launch = request.config.launch
    return LeaseTerms(
        address=made.master_address,
        port=port,
        token=token,
        seconds=launch.node_loss_timeout,
        wait=launch.on_node_loss == "wait",
        head=launch.on_head_loss,
        attached=not request.detached,
        grace=launch.grace,
    )
