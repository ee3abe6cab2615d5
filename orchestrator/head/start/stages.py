"""Start a job: reach its nodes, choose among them, bring what they lack, plan, check, start.

The next attempt of a job is one more turn of the same line, with fewer questions: each node has the
program, the code and the environment with its secrets from the attempt before, so that any head can
start it, and is told only its place among the others.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from orchestrator.common import logs as job_log
from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError, StoppedEarly
from orchestrator.common.text import Say, parse_seconds, plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.restarts import Restarts
from orchestrator.head.follow.streams import last_lines
from orchestrator.head.follow.streams.node_logs import NodeLogs, open_logs
from orchestrator.head.nodes.facts import said_of
from orchestrator.head.plan.model import Plan
from orchestrator.head.plan.plan import DEFAULT_PORT
from orchestrator.head.screen import failures, output
from orchestrator.head.screen.progress import Progress, counted
from orchestrator.head.screen.styles import WARNING, styled
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
from orchestrator.head.start.recovery.gather import (
    Gathered,
    Gathering,
    NotBack,
    all_answers,
    refuse_if_stopped,
)
from orchestrator.head.start.recovery.spares import Latecomers
from orchestrator.head.start.request import Request
from orchestrator.head.transfer.fetch import gaps
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import End
from orchestrator.protocol.requests.machine import PortWish
from orchestrator.protocol.requests.start import Start, StartedHere, TakenPorts, TakePorts
from orchestrator.protocol.spec import Attempt, Placement
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

log = logging.getLogger(__name__)

END_SECONDS = 10.0
PORT_SECONDS = 10.0
LAST_PORT = 60_000
SHORTEST_LIMIT_SECONDS = 1.0


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

    return queue.wait(request, nodes, partial(reach_with_code, request, say), say, queued)


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


# -- a further attempt ------------------------------------------------------------------------


@dataclass(frozen=True)
class Again:
    """A job of which an attempt has ended, and what its head still has of it."""

    experiment: Experiment
    record: JobRecord
    transport: Transport
    channels: Mapping[int, NodeChannel]
    latecomers: Latecomers | None = None


def launch_again(job: Again, say: Say) -> Running | JobRecord:
    """Start attempts until one runs, and return it; or the record of a job that is over."""
    experiment, ended = job.experiment, job.record
    gathering = Gathering(experiment, ended, job.transport, job.channels, say, job.latecomers)
    while True:
        gathered = None
        log.info("attempt %d has ended; gathers the nodes of the next one", ended.attempt)
        try:
            gathered = gathering.run()
            log.info("the next attempt has %s", [node.name for node in gathered.nodes])
            bring_what_is_lacking(experiment, ended, gathered, say)
            bring_saved(job, ended, gathered, say)
            return start_again(experiment, ended, gathered, say)
        except NotBack as error:
            final = record.given_up(ended, error)
            say(f"{error.what}; the job is given up")
        except OrchestratorError as error:
            log.info("the next attempt could not be started: %s", error)
            nodes = None if gathered is None else (gathered.nodes, gathered.spares)
            if gathered is not None and isinstance(error, NotAllStarted):
                nodes = error.nodes, gathered.spares
            final = Restarts(record.failed_to_start(ended, nodes, error)).after(experiment)
            if not isinstance(error, StoppedEarly):
                say(f"attempt {ended.attempt} could not be started: {error}")
        try:
            experiment.write_signed(final)
        except OSError as error:
            say(f"job.json cannot be written: {error.strerror}")
        if final.over:
            return final
        ended = gathering.record = final


def bring_what_is_lacking(
    experiment: Experiment, ended: JobRecord, gathered: Gathered, say: Say
) -> None:
    """Let logs and metrics here be as those of nodes that are back, before more is written."""
    there = {node.name: gathered.channels[node.index] for node in gathered.nodes}
    back = [node for node in ended.lost if node.name in there]
    last_lines.bring(experiment, ended, back, lambda node: there[node.name], say)
    outputs, latest = experiment.path / "outputs", {one.job for one in ended.latest}
    wanted = gaps.lacking(outputs) if back else ()

    def bring_metrics(node: NodeRecord) -> None:
        channel, part = there[node.name], ended.first_part(node)
        left = last_lines.last_part(ended, node)
        if left is not None and left[0] in latest:
            gaps.extend(channel, part, outputs)
        elif wanted:
            gaps.fill(channel, part, outputs, wanted)

    fleet.everywhere(back, bring_metrics)


def bring_saved(job: Again, ended: JobRecord, gathered: Gathered, say: Say) -> None:
    """Bring the nodes what they lack of the newest state, and of what the program saved."""
    from orchestrator.head.transfer.bring import resume

    stopped = partial(refuse_if_stopped, job.experiment)
    nodes, spares = gathered.nodes, gathered.spares
    resume.bring_to_attempt(
        job.experiment, ended, nodes, gathered.channels, spares, job.transport, say, stopped
    )


def start_again(experiment: Experiment, ended: JobRecord, gathered: Gathered, say: Say) -> Running:
    """Record the next attempt, and start it on every node or on none."""
    number, most = len(ended.attempts) + 1, Restarts(ended).most_attempts
    line = f"attempt {number} of at most {most} ({ended.attempts[-1].why})"
    say(styled(line, WARNING))
    ports = take_ports(ended, gathered)
    nodes, others = gathered.nodes, gathered.spares
    starting = record.record_again(experiment, ended, nodes, others, ports.port, line)
    logs = open_logs(experiment, starting.nodes)
    refuse_if_stopped(experiment)
    orders = [Start(place=place) for place in places(starting, ports)]
    results = start_all(starting, gathered.channels, orders)
    try:
        started = all_answers(starting.nodes, results)
    except NodeError as error:
        raise NotAllStarted(error, with_doubts(starting.nodes, results)) from error
    log.info("attempt %d runs as job %s", number, starting.job)
    say_how_warm(starting.nodes, started, say)
    running = record.has_started(experiment, starting)
    return Running(running, gathered.channels, logs)


def take_ports(ended: JobRecord, gathered: Gathered) -> TakenPorts:
    """Take fresh ports on the first node: a straggler must not meet the new ranks."""
    chosen = ended.launch.master_port
    before = int(ended.master.rpartition(":")[2] or DEFAULT_PORT)
    after = before + 1 if before < LAST_PORT else DEFAULT_PORT
    wanted = PortWish(
        wanted=chosen or after,
        exact=chosen is not None,
        peers=len(gathered.nodes) > 1,
    )
    ports = gathered.channels[0].ask(TakePorts(port=wanted), PORT_SECONDS)
    if not ports.port:
        raise CheckFailed(f"no port from {wanted.wanted} on is free on {gathered.nodes[0].name}")
    return ports


def places(starting: JobRecord, ports: TakenPorts) -> list[Placement]:
    """Return the place of each node in a further attempt."""
    token, master = secrets.token_hex(32), starting.nodes[0].address
    nproc = {node.name: node.nproc for node in (*starting.nodes, *starting.spares)}
    limit = left_of(starting)
    known = starting.nodes if starting.launch.ranks_know_hosts else ()
    hosts = tuple(node.address for node in known)
    return [
        Placement(
            job=starting.job,
            node=node.index,
            nnodes=len(starting.nodes),
            first_rank=node.first_rank,
            master=master,
            port=ports.port,
            supervisors=master,
            supervisors_port=ports.peers_port,
            token=token,
            hosts=hosts,
            limit=limit,
            attempt=Attempt(
                number=len(starting.attempts) + 1,
                restarts=Restarts(starting).ahead,
                first_job=node.first_job,
                first_node=node.first_node,
                log=node.log_before,
                # With how many ranks the job began: those that it has now keep its batch.
                ranks=sum(nproc[name] for name in starting.attempts[0].nodes),
            ),
        )
        for node in starting.nodes
    ]


def left_of(starting: JobRecord) -> float:
    """Return the seconds that are left of the job's time limit; 0 where it has none."""
    limit = starting.launch.time_limit
    if not limit:
        return 0.0
    began = starting.attempts[0].started if starting.attempts else starting.started
    return max(SHORTEST_LIMIT_SECONDS, parse_seconds("--time-limit", limit) + began - time.time())


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


class NotAllStarted(NodeError):
    """Raised for a further attempt; its nodes are as the start has left them."""

    def __init__(self, error: NodeError, nodes: Sequence[NodeRecord]) -> None:
        super().__init__(error.what, error.fix, names=error.names)
        self.nodes = nodes


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
