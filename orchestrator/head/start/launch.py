"""Start a job: reach its nodes, send the code, hold the GPUs, plan, check, start.

The next attempt of a job (head/start/recovery/again.py) is the same line with a past: its nodes
have their parts, and are told only their places.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from orchestrator.common import interrupt
from orchestrator.common import logs as job_log
from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.common.text import plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.follow.streams.node_logs import open_logs
from orchestrator.head.nodes.facts import said_of
from orchestrator.head.plan.model import Plan
from orchestrator.head.screen import failures, output
from orchestrator.head.screen.output import say
from orchestrator.head.screen.progress import Progress, counted
from orchestrator.head.start import payload, record, selection
from orchestrator.head.start.claims.after import wait_for_others
from orchestrator.head.start.code import expect_code, reach_with_code
from orchestrator.head.start.nodes import ListedNodes, Nodes, reach_all
from orchestrator.head.start.parts import Meeting, Prepared, make_plan, part, patience, places
from orchestrator.head.start.record import Running
from orchestrator.head.start.recovery.spares import stand_by
from orchestrator.head.start.request import Request, without_claims
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import End
from orchestrator.protocol.requests.start import Start, StartedHere, TakenPorts
from orchestrator.protocol.timing import QUICK_ANSWER_SECONDS
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.experiments import check_name

log = logging.getLogger(__name__)

IN_DOUBT = (
    "what it may have started there ends by itself: when it answers again, `orchestrator stop`"
    " proves that"
)


@dataclass(frozen=True)
class Launched:
    """A job whose first attempt runs on all of its nodes."""

    prepared: Prepared
    running: Running

    @property
    def experiment(self) -> Experiment:
        return self.prepared.experiment


# -- the line ---------------------------------------------------------------------------------


def launch(request: Request, queued: Callable[[], None] = lambda: None) -> Launched:
    """Start a job on all of its nodes or on none; `queued` is called once it waits for them."""
    job_log.hold(request.secrets)
    log.info("launches %s from %s", request.target.name or "the engine", request.directory)
    if request.config.launch.after:
        queued()
        wait_for_others(request)
    request, nodes = reach_with_code(request)
    times = {"begin": request.begun, "reached": nodes.at, "synced": time.time()}
    request, nodes = hold(request, nodes, queued)
    experiment = create(request, nodes)
    with discarded_on_error(experiment):
        job = f"{experiment.name}-{secrets.token_hex(3)}"
        planned = plan(request, nodes, experiment, job)
        times["planned"] = time.time()
        prepared = Prepared(request, nodes, experiment, planned, times)
        check(prepared)
        times["checked"] = time.time()
    starting = record.record_job(prepared)
    address = prepared.plan.master_address
    peers_port = prepared.nodes.reached[0].facts.peers_port or 0
    ports = TakenPorts(port=prepared.plan.master_port, peers_port=peers_port)
    return start(prepared, starting, Meeting(address, address, ports))


def rehearse(request: Request) -> Plan:
    """Plan a job as a launch would; nothing is sent to the nodes, held or started there."""
    request, nodes = expect_code(request, reach_all(request))
    request = as_held(request, nodes)
    nodes = selection.choose(request, nodes, hold=False)
    name = request.config.launch.name
    check_name(name)
    job = f"{name}_dry-run"
    experiment = Experiment(request.where.experiments.absolute() / job)
    return plan(request, nodes, experiment, job)


def hold(request: Request, nodes: Nodes, queued: Callable[[], None]) -> tuple[Request, Nodes]:
    """Choose the nodes of a job and hold its GPUs there; with --queue wait until they are free."""
    request = as_held(request, nodes)
    if not request.config.launch.queue:
        return held_now(request, nodes)
    from orchestrator.head.start.claims import queue  # no other launch needs it

    queued()
    return queue.wait(request, nodes, partial(reach_with_code, request), held_now)


def as_held(request: Request, nodes: Nodes) -> Request:
    """Return the launch as it holds GPUs: a scheduler's nodes are held by the scheduler."""
    return request if isinstance(nodes.source, ListedNodes) else without_claims(request)


def held_now(request: Request, nodes: Nodes) -> tuple[Request, Nodes]:
    """Choose the nodes of a job among these, and hold its GPUs there."""
    return request, selection.choose(request, nodes, hold=True)


def create(request: Request, nodes: Nodes) -> Experiment:
    """Make the directory of a job; it is removed where the job cannot be started."""
    if request.payload is not None:
        payload.check_python(nodes.probed)
    interrupt.hold()
    experiment = nodes.source.experiment(request.where.experiments, request.config.launch.name)
    interrupt.undo_with(experiment.discard)  # until the job is recorded
    interrupt.answer_now()
    job_log.keep_in(experiment.head_log)
    return experiment


@contextlib.contextmanager
def discarded_on_error(experiment: Experiment) -> Iterator[None]:
    """Remove the directory of a job that cannot be started."""
    try:
        yield
    except OrchestratorError as error:
        log.info("nothing is started: %s", error)
        experiment.discard()
        raise


def plan(request: Request, nodes: Nodes, experiment: Experiment, job: str) -> Plan:
    """Decide what each node runs."""
    log.info("plans job %s in %s", job, experiment.path)
    return make_plan(request, nodes, job, str(experiment.path))


def check(prepared: Prepared) -> None:
    """Refuse nodes that are not fit for the job."""
    log.info("checks %d nodes", len(prepared.nodes.reached))
    with Progress("checking"):
        selection.check(prepared.request, prepared.nodes)


def start(prepared: Prepared, starting: JobRecord, meeting: Meeting) -> Launched:
    """Start a job that was recorded, and describe it in its manifest."""
    request, nodes, planned = prepared.request, prepared.nodes, prepared.plan
    prepared.times["recorded"] = time.time()
    job_log.keep_in(prepared.experiment.head_log)
    log.info("job %s is recorded in %s", planned.job, prepared.experiment.path)
    announce(planned)
    say(f"logs in {output.path(prepared.experiment.logs)}")
    try:
        logs = open_logs(prepared.experiment, starting.nodes)  # after the start it is too late
        if request.payload is not None:
            payload.deliver(nodes.reached, planned, request.payload)
        channels = [node.channel for node in nodes.reached]
        orders = [
            Start(spec=part(request, planned, node), place=place)
            for node, place in zip(
                planned.nodes, places(starting, meeting, planned.world_size), strict=True
            )
        ]
        start_all(starting, channels, orders)
        prepared.times["started"] = time.time()
        job_log.let_go()
        log.info("all %d supervisors have started torchrun", len(orders))
        starting = replace(starting, spares=stand_by(prepared, nodes.spares))
    except NotStarted as error:
        log.info("the job could not be started: %s", error)
        record.record_failure(prepared.experiment, replace(starting, nodes=error.nodes), error)
        raise NodeError(error.table) from error
    except OrchestratorError as error:
        log.info("the job could not be started: %s", error)
        record.record_failure(prepared.experiment, starting, error)
        raise
    finally:  # not before the start: YAML takes 20 ms, git 10 ms, and seconds in a large tree
        for spare in nodes.spares:
            spare.channel.connection.close()
        if problem := record.describe(prepared):
            say(problem)
    running = Running(record.has_started(prepared.experiment, starting), channels, logs)
    return Launched(prepared, running)


def announce(plan: Plan) -> None:
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


class NotStarted(NodeError):
    """Raised where a node has not started its part; `nodes` are as the start has left them."""

    def __init__(
        self,
        nodes: Sequence[NodeRecord],
        failed: Sequence[tuple[NodeRecord, OrchestratorError]],
        lost: Collection[str],
    ) -> None:
        what = "; ".join(f"{node.name}: {error.what}" for node, error in failed)
        super().__init__(what, names=[node.name for node, _ in failed])
        # A node that may have started is recorded as lost: `stop` asks it as well.
        self.nodes = [replace(n, state="lost") if n.name in lost else n for n in nodes]
        self.table = failures.failure_table(failed, len(nodes), "; the others were ended again")


def start_all(
    starting: JobRecord, channels: Sequence[NodeChannel], orders: Sequence[Start]
) -> None:
    """Start all parts at once; if one cannot start, end the others again, and raise."""
    parts = list(zip(channels, orders, starting.nodes, strict=True))
    log.info("starts the supervisors of %s", starting.job)

    def ask(part: tuple[NodeChannel, Start, NodeRecord]) -> StartedHere:
        return part[0].ask(part[1], patience(starting.launch))

    def end(part: tuple[NodeChannel, Start, NodeRecord]) -> Message:
        order = End(job=starting.job, node=part[2].index, why="not started", grace=0.0)
        return part[0].ask(order, QUICK_ANSWER_SECONDS)

    with counted("starting", ask, parts) as counting:
        results = fleet.everywhere(parts, counting)
    if any(isinstance(result, OrchestratorError) for result in results):
        log.info("a node has not started its part: ends the others again")
        ended = fleet.everywhere(parts, end)
        payload.raise_if_stopped(results)
        failed, lost = list[tuple[NodeRecord, OrchestratorError]](), set[str]()
        for node, result, answer in zip(starting.nodes, results, ended, strict=True):
            if isinstance(answer, OrchestratorError) and may_have_started(result):
                lost.add(node.name)
                failed.append((node, NodeError(answer.what, IN_DOUBT)))
            elif isinstance(result, OrchestratorError):
                failed.append((node, result))
        raise NotStarted(starting.nodes, failed, lost)
    say_how_warm(starting.nodes, [r for r in results if isinstance(r, StartedHere)])


def may_have_started(result: StartedHere | OrchestratorError) -> bool:
    """Return True unless a node has said that it did not start its part."""
    unknown = isinstance(result, NodeError) and not isinstance(result, Declined)
    return isinstance(result, StartedHere) or unknown


def say_how_warm(nodes: Sequence[NodeRecord], started: Sequence[StartedHere]) -> None:
    """Say which nodes started from warm processes, and why others did not, where that was asked."""
    pairs = list(zip(nodes, started, strict=True))
    warm = [node.name for node, answer in pairs if answer.warm.warm]
    if warm:
        say(f"warm start on {'all nodes' if len(warm) == len(nodes) else ', '.join(warm)}")
    for line in said_of([(node.name, answer.warm.why) for node, answer in pairs]):
        say(line)
