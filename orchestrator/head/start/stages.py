"""Start a job: reach its nodes, choose among them, bring what they lack, plan, check, start.

The next attempt of a job is one more turn of the same line: head/start/recovery/again.py.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from orchestrator.common import logs as job_log
from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.common.text import Say, plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.follow.streams.node_logs import NodeLogs, open_logs
from orchestrator.head.nodes.facts import said_of
from orchestrator.head.plan.model import Plan
from orchestrator.head.screen import failures, output
from orchestrator.head.screen.progress import Progress, counted
from orchestrator.head.start import payload, record, selection
from orchestrator.head.start.claims import claims
from orchestrator.head.start.code import expect_code, reach_with_code
from orchestrator.head.start.nodes import ListedNodes, Nodes, reach_all
from orchestrator.head.start.planning import (
    Meeting,
    Prepared,
    discarded_on_error,
    patience,
    prepare,
    specs,
)
from orchestrator.head.start.recovery import spares
from orchestrator.head.start.recovery.blueprint import Blueprint
from orchestrator.head.start.recovery.spares import Latecomers
from orchestrator.head.start.request import Request
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import End
from orchestrator.protocol.requests.start import Start, StartedHere
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

log = logging.getLogger(__name__)

END_SECONDS = 10.0


@dataclass(frozen=True)
class Running:
    """An attempt that runs on all its nodes now, with open channels to them."""

    record: JobRecord
    channels: Sequence[NodeChannel]
    logs: Sequence[NodeLogs]  # the local files, open


@dataclass(frozen=True)
class Launched:
    """A job whose first attempt runs on all its nodes now."""

    experiment: Experiment
    nodes: Nodes
    running: Running
    latecomers: Latecomers | None = None


# -- the first attempt ------------------------------------------------------------------------


def launch(request: Request, say: Say, queued: Callable[[], None] = lambda: None) -> Launched:
    """Start a job on all its nodes or on none; `queued` is called once it waits for them."""
    job_log.hold(request.secrets)
    log.info("launches %s from %s", request.target.name or "the engine", request.directory)
    prepared = in_turn(request, say, queued)
    request = prepared.request
    log.info("checks %d nodes", len(prepared.nodes.reached))
    with discarded_on_error(prepared.experiment):
        with Progress("checking"):
            selection.check(request, prepared.nodes, say)
        bring_checkpoint(prepared, say)
    prepared.times["checked"] = time.time()
    log.info("checked; the supervisors meet at %s", prepared.plan.master_address)
    peers_port = prepared.nodes.reached[0].facts.peers_port or 0
    meeting = Meeting(prepared.plan.master_address, peers_port, secrets.token_hex(32))
    return start(prepared, record.record_job(prepared), meeting, say)


def in_turn(request: Request, say: Say, queued: Callable[[], None]) -> Prepared:
    """Prepare a job whose nodes are free, or with --queue wait until they are."""
    log.info("reaches the nodes, and brings them the code")
    request, nodes = reach_with_code(request, say)
    waits = request.config.launch.waits and isinstance(nodes.source, ListedNodes)
    if not waits:
        return prepare(request, nodes)
    from orchestrator.head.start.claims import queue  # no other launch needs it

    queued()
    return queue.wait(request, nodes, partial(reach_with_code, request, say), prepare, say)


def rehearse(request: Request) -> Prepared:
    """Plan a job as a launch would; nothing is sent to the nodes, or started there."""
    request, nodes = expect_code(request, reach_all(request))
    prepared = prepare(request, nodes, dry_run=True)
    taken = claims.foreseen(prepared.request, prepared.nodes.reached)
    return replace(prepared, plan=replace(prepared.plan, notes=(*prepared.plan.notes, *taken)))


def bring_checkpoint(prepared: Prepared, say: Say) -> None:
    """See that the nodes have the state that the job resumes from, also from those it leaves."""
    request, nodes, plan = prepared.request, prepared.nodes, prepared.plan
    if request.config.checkpoint.resume == "never" or shares_all(prepared):
        return
    # Most launches do without it.
    from orchestrator.head.transfer.bring import resume
    from orchestrator.head.transfer.bring.checkpoint import Partner

    partners = [
        Partner(
            part.node.name,
            reached.channel,
            address=part.address,
            login=part.node,
            job=(plan.job, part.index),
        )
        for reached, part in zip(nodes.reached, plan.nodes, strict=True)
    ]
    others = [Partner(node.name, login=node) for node in nodes.source.nodes]
    name, where = request.config.launch.name, request.where
    about = resume.Start(request.config.checkpoint, where, name, partners, others)
    resume.bring_to_start(about, nodes.transport, say)


def shares_all(prepared: Prepared) -> bool:
    """Tell whether all nodes see the experiments where this machine has them."""
    here = prepared.request.where.experiments.absolute().is_relative_to(Path.cwd())
    return here and all(node.facts.marker_seen for node in prepared.nodes.reached)


def start(prepared: Prepared, starting: JobRecord, meeting: Meeting, say: Say) -> Launched:
    """Start a job that was recorded, and describe it in its manifest."""
    request, nodes, plan = prepared.request, prepared.nodes, prepared.plan
    prepared.times["recorded"] = time.time()
    job_log.keep_in(prepared.experiment.head_log)
    log.info("job %s is recorded in %s", plan.job, prepared.experiment.path)
    blueprint = Blueprint.of(prepared, meeting)
    announce(plan, say)
    say(f"logs in {output.path(prepared.experiment.logs)}")
    try:
        logs = open_logs(prepared.experiment, starting.nodes)  # after the start it is too late
        if request.payload is not None:
            payload.deliver(nodes.reached, plan, request.payload)
        channels = [node.channel for node in nodes.reached]
        orders = [Start(spec=spec) for spec in specs(request, plan, meeting)]
        results = start_all(starting, channels, orders)
        starting = replace(starting, nodes=with_doubts(starting.nodes, results))
        then = "; the others were ended again"
        started = failures.all_or_table([node.node for node in nodes.reached], results, then)
        prepared.times["started"] = time.time()
        job_log.let_go()
        log.info("all %d supervisors have started torchrun", len(started))
        say_how_warm(starting.nodes, started, say)
        standing = spares.keep(blueprint, nodes.spares, say)
        starting = replace(starting, spares=standing)
    except OrchestratorError as error:
        log.info("the job could not be started: %s", error)
        record.record_failure(prepared.experiment, starting, error, say)
        raise
    finally:  # not before the start: YAML takes 20 ms, git 10 ms, and seconds in a large tree
        problem = record.describe(prepared)
        if problem:
            say(problem)
    running = Running(record.has_started(prepared.experiment, starting), channels, logs)
    return Launched(prepared.experiment, nodes, running, Latecomers.of(blueprint))


def announce(plan: Plan, say: Say) -> None:
    """Say what is about to start."""
    for note in plan.notes:
        say(note)
    node, master = plan.nodes[0], f"master {plan.master}"
    count = int(node.env["NNODES"])
    last = f" to {node.last_rank}" if node.nproc > 1 else ""
    ranks_of_node = f"rank{'s' if last else ''} {node.first_rank}{last}"
    if len(plan.nodes) == count:
        ranks = f"{plural(count, 'node')}, {plural(plan.world_size, 'rank')}"
        say(f"{ranks}, {master}, {plan.start} start")
    else:
        say(
            f"node {node.index} of {count}: {ranks_of_node} of"
            f" {plan.world_size}, {master}, {plan.start} start"
        )


# -- of all attempts --------------------------------------------------------------------------


def start_all(
    starting: JobRecord, channels: Sequence[NodeChannel], orders: Sequence[Start]
) -> list[StartedHere | OrchestratorError]:
    """Start all parts at once; if one cannot start, end the others again."""
    pairs = list(zip(channels, orders, strict=True))
    log.info("starts the supervisors of %s", starting.job)

    def ask(pair: tuple[NodeChannel, Start]) -> StartedHere:
        return pair[0].ask(pair[1], patience(starting.launch))

    with counted("starting", ask, pairs) as counting:
        results = fleet.everywhere(pairs, counting)
    if any(isinstance(result, OrchestratorError) for result in results):
        reason = "not started"
        log.info("a node has not started its part: ends the others again")
        ends = [End(job=starting.job, node=n.index, why=reason, grace=0.0) for n in starting.nodes]
        ended = fleet.everywhere(
            list(zip(channels, ends, strict=True)), lambda pair: pair[0].ask(pair[1], END_SECONDS)
        )
        payload.raise_if_stopped(results)
        results = list(map(in_doubt, results, ended))
    return results


class InDoubt(NodeError):
    """Raised for a node that has started or may have, and that did not answer its end."""


def in_doubt(
    started: StartedHere | OrchestratorError, ended: Message | OrchestratorError
) -> StartedHere | OrchestratorError:
    """Say so where a node may have started its part of a job that did not start."""
    if not isinstance(ended, OrchestratorError) or isinstance(started, Declined):
        return started  # its end was heard there, or nothing has begun
    if isinstance(started, OrchestratorError) and not isinstance(started, NodeError):
        return started
    return InDoubt(
        started.what if isinstance(started, NodeError) else ended.what,
        "what it may have started there ends by itself: when it answers again, `orchestrator stop`"
        " proves that",
    )


def with_doubts(
    nodes: Sequence[NodeRecord], results: Sequence[StartedHere | OrchestratorError]
) -> list[NodeRecord]:
    """Record the nodes that may have started as lost: `stop` asks them, too."""
    return [
        replace(node, state="lost") if isinstance(result, InDoubt) else node
        for node, result in zip(nodes, results, strict=True)
    ]


def say_how_warm(nodes: Sequence[NodeRecord], started: Sequence[StartedHere], say: Say) -> None:
    """Say which nodes started from warm processes, and why others did not, where that was asked."""
    pairs = list(zip(nodes, started, strict=True))
    warm = [node.name for node, answer in pairs if answer.warm.warm]
    if warm:
        say(f"warm start on {'all nodes' if len(warm) == len(nodes) else ', '.join(warm)}")
    whys = [(node.name, answer.warm.why) for node, answer in pairs]
    for line in said_of(whys):
        say(line)
