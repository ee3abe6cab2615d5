"""Launch a job that was prepared: check its nodes, record it, start it on all of them or none."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.common.errors import OrchestratorError
from orchestrator.common.text import Say, plural
from orchestrator.head.connect import fleet
from orchestrator.head.follow.node_logs import NodeLogs, open_logs
from orchestrator.head.nodes.facts import by_value
from orchestrator.head.plan.model import NodePlan, Plan
from orchestrator.head.start import payload, preflight, spares
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.prepare import Prepared, discarded_on_error
from orchestrator.head.start.record import describe, record_failure, record_job
from orchestrator.head.start.spares import Latecomers
from orchestrator.head.start.spec import Meeting, specs
from orchestrator.protocol.requests.follow import End
from orchestrator.protocol.requests.start import Start, StartedHere
from orchestrator.records.experiment import Experiment, JobRecord

START_TIMEOUT = 30.0
END_TIMEOUT = 10.0


@dataclass(frozen=True)
class Launched:
    """A job that runs on all its nodes now, with open channels to them."""

    experiment: Experiment
    record: JobRecord
    nodes: Nodes
    logs: Sequence[NodeLogs]  # the local files, open
    latecomers: Latecomers | None = None


def launch(prepared: Prepared, say: Say) -> Launched:
    """Check the nodes, record the job, and start it on every node or on none."""
    with discarded_on_error(prepared.experiment):
        preflight.check(prepared.request, prepared.nodes, say)
        if prepared.request.config.checkpoint.resume != "never" and not shares_all(prepared):
            bring_checkpoint(prepared, say)
    prepared.times["checked"] = time.time()
    record = record_job(prepared)
    peers_port = prepared.nodes.reached[0].facts.peers_port or 0
    meeting = Meeting(prepared.plan.master_address, peers_port, secrets.token_hex(32))
    return start(prepared, record, meeting, say)


def shares_all(prepared: Prepared) -> bool:
    """Tell whether all nodes see the experiments where this machine has them."""
    here = prepared.request.where.experiments.absolute().is_relative_to(Path.cwd())
    return here and all(node.facts.marker_seen for node in prepared.nodes.reached)


def bring_checkpoint(prepared: Prepared, say: Say) -> None:
    """See that the nodes have the state that the job resumes from, also from those it leaves."""
    from orchestrator.head.resume import start as resume  # most launches do without it
    from orchestrator.head.resume.holder import Holder

    request, nodes, plan = prepared.request, prepared.nodes, prepared.plan
    own = [
        Holder(part.node.name, part.node, part.address, reached.channel, (plan.job, part.index))
        for reached, part in zip(nodes.reached, plan.nodes, strict=True)
    ]
    others = [Holder(node.name, node) for node in nodes.source.nodes]
    name, where = request.config.launch.name, request.where
    about = resume.Start(request.config.checkpoint, where, name, own, others)
    resume.bring(about, nodes.transport, say)


def start(prepared: Prepared, record: JobRecord, meeting: Meeting, say: Say) -> Launched:
    """Start a job that was recorded, and describe it in its manifest."""
    request, nodes, plan = prepared.request, prepared.nodes, prepared.plan
    prepared.times["recorded"] = time.time()
    announce(plan, say)
    say(f"logs in {prepared.experiment.logs}")
    try:
        logs = open_logs(prepared.experiment, record.nodes)  # after the start it is too late
        if request.payload is not None:
            payload.deliver(nodes.reached, plan, request.payload)
        started = start_supervisors(prepared, meeting)
        prepared.times["started"] = time.time()
        say_how_warm(started, plan, say)
        record = replace(record, spares=spares.keep(prepared, meeting, say))
    except OrchestratorError as error:
        record_failure(prepared.experiment, record, error, say)
        raise
    finally:  # not before the start: YAML takes 20 ms, git 10 ms, and seconds in a large tree
        problem = describe(prepared)
        if problem:
            say(problem)
    record = has_started(prepared.experiment, record)
    late = spares.Latecomers.of(prepared, meeting)
    return Launched(prepared.experiment, record, nodes, logs, late)


def has_started(experiment: Experiment, record: JobRecord) -> JobRecord:
    """Record that torchrun is on its way on every node, whoever follows the job or nobody."""
    nodes = [replace(node, state="running") for node in record.nodes]
    record = replace(record, state="running", nodes=nodes)
    with contextlib.suppress(OSError):  # a full disk: the head that follows it tries again
        # Spares may be given orders, too; without any the orders are those that are signed.
        (experiment.write_signed if record.spares else experiment.write_record)(record)
    return record


def announce(plan: Plan, say: Say) -> None:
    """Say what is about to start."""
    for note in plan.notes:
        say(note)
    node, master = plan.nodes[0], f"master {plan.master_address}:{plan.master_port}"
    count = int(node.env["NNODES"])
    last = f" to {node.last_rank}" if node.nproc > 1 else ""
    own = f"rank{'s' if last else ''} {node.first_rank}{last}"
    if len(plan.nodes) == count:
        ranks = f"{plural(count, 'node')}, {plural(plan.world_size, 'rank')}"
        say(f"{ranks}, {master}, {plan.start} start")
    else:
        say(
            f"node {node.index} of {count}: {own} of"
            f" {plan.world_size}, {master}, {plan.start} start"
        )


def say_how_warm(started: Sequence[StartedHere], plan: Plan, say: Say) -> None:
    """Say which nodes started from warm processes, and why others did not."""
    warm = [node for node, answer in zip(plan.nodes, started, strict=True) if answer.warm.warm]
    if warm:
        which = "all nodes" if len(warm) == len(plan.nodes) else names(warm)
        say(f"warm start on {which}")
    whys = zip(plan.nodes, (answer.warm.why for answer in started), strict=True)
    for why, nodes in by_value(whys).items():
        if why:
            say(f"{names(nodes)}: {why}")


def names(nodes: Sequence[NodePlan]) -> str:
    return ", ".join(node.node.name for node in nodes)


def start_supervisors(prepared: Prepared, meeting: Meeting) -> list[StartedHere]:
    """Start the supervisors of all nodes; if one cannot start, end the others again."""
    plan, reached = prepared.plan, prepared.nodes.reached
    starts = [Start(spec=spec) for spec in specs(prepared.request, plan, meeting)]
    results = fleet.ask(reached, starts, START_TIMEOUT)
    try:
        payload.raise_if_stopped(results)
        nodes = [n.node for n in reached]
        return fleet.all_or_table(nodes, results, "; the others were ended again")
    except OrchestratorError:
        ends = [End(job=plan.job, node=n.index, why="not started", grace=0.0) for n in plan.nodes]
        fleet.ask(reached, ends, END_TIMEOUT)  # one that cannot be ended is in the error already
        raise
