"""Start a job: reach its nodes, send the code, hold the GPUs, plan, check, start.

The next attempt of a job takes a shorter way (launch_again): each node still has the program, the
code and the environment with its secrets from the attempt before. It receives only its placement
(node index, ranks, master). So any head can start the next attempt.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from orchestrator.common import interrupt
from orchestrator.common import logs as job_log
from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError, StoppedEarly
from orchestrator.common.hosts import join_names
from orchestrator.common.text import plural
from orchestrator.config import resolved
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.connect.reach import Reached, open_serving_channel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.events import of_job, of_launch
from orchestrator.head.follow.streams.node_logs import open_logs
from orchestrator.head.nodes.facts import ProbedNode, lines_by_node
from orchestrator.head.plan.model import Plan
from orchestrator.head.plan.plan import DEFAULT_PORT
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.head.screen import failures, output
from orchestrator.head.screen.events import tell
from orchestrator.head.screen.progress import counted_work
from orchestrator.head.start import claims, record, selection
from orchestrator.head.start.code import expect_code, reach_while_scanning, send_code
from orchestrator.head.start.gather import Gathered, Gathering, NotBack, refuse_if_stopped
from orchestrator.head.start.nodes import ListedNodes, Nodes, reach_nodes
from orchestrator.head.start.parts import (
    Prepared,
    first_placement,
    make_plan,
    placements_of_attempt,
    run_hook,
    spare_plan,
    spec_of_node,
    start_patience,
)
from orchestrator.head.start.record import Running
from orchestrator.head.transfer.scan import cache_directory
from orchestrator.head.transfer.send import send_to_all
from orchestrator.head.transfer.tree import tree_of_files
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import End
from orchestrator.protocol.requests.machine import PortRequest
from orchestrator.protocol.requests.request import STOPPED
from orchestrator.protocol.requests.start import Start, StartedHere, TakenPorts, TakePorts
from orchestrator.protocol.requests.transfer import HANDED, RemoteDir
from orchestrator.protocol.spec import Placement
from orchestrator.protocol.timing import ANSWER_SECONDS, QUICK_ANSWER_SECONDS
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.experiments import check_name

log = logging.getLogger(__name__)

LAST_PORT = 60_000
IN_DOUBT = (
    "what it may have started there ends by itself: when it answers again, `orchestrator stop`"
    " proves that"
)


# -- the first attempt ------------------------------------------------------------------------


def launch(request: LaunchRequest, queued: Callable[[], None] = lambda: None) -> Running:
    """Start a job on all of its nodes or on none; call `queued` before waiting for a turn."""
    job_log.hold_lines()
    interrupt.call_before_exit(partial(keep_log_of_no_job, cache_directory() / "launch.log"))
    log.info("launches %s from %s", request.target.name or "the engine", request.directory)
    if request.config.launch.after:
        queued()
        claims.wait_for_others(request)
    nodes = reach_while_scanning(request)
    # Before it waits for GPUs: what was typed is what runs.
    request, nodes = send_code(request, nodes)
    times = {"begin": request.begun, "reached": nodes.at, "synced": time.time()}
    request, nodes = hold_nodes(request, nodes, queued)
    if request.payload is not None:
        check_python(nodes.probed)
    experiment = create_directory(request, nodes)
    with discarded_on_error(experiment):
        job = f"{experiment.name}-{secrets.token_hex(3)}"
        planned = make_plan(request, nodes, job, str(experiment.path))
        planned = run_hook(planned, nodes, request)
        times["planned"] = time.time()
        selection.check_nodes(request, nodes)
        times["checked"] = time.time()
    prepared = Prepared(request, nodes, experiment, planned, times)
    starting = record.record_job(prepared)
    ports = TakenPorts(port=planned.master_port, peers_port=nodes.reached[0].facts.peers_port or 0)
    return start_job(prepared, starting, first_placement(starting, planned.master_address, ports))


def keep_log_of_no_job(path: Path) -> None:
    """Write what was logged to this file if the job did not start: one that did has a log."""
    if job_log.is_holding_lines():
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            job_log.write_log_to(path)


def rehearse_launch(request: LaunchRequest) -> Plan:
    """Plan a job as a launch would; send no code, and hold or start nothing on the nodes."""
    request, nodes = expect_code(request, reach_nodes(request))
    request = as_held(request, nodes)
    nodes = selection.select_nodes(request, nodes, hold=False)
    name = request.config.launch.name
    check_name(name)
    job = f"{name}_dry-run"
    planned = make_plan(request, nodes, job, str(request.where.experiments.absolute() / job))
    return run_hook(planned, nodes, request)


def hold_nodes(
    request: LaunchRequest, nodes: Nodes, queued: Callable[[], None]
) -> tuple[LaunchRequest, Nodes]:
    """Choose the nodes of a job and hold its GPUs there; with --queue wait until they are free."""
    request = as_held(request, nodes)
    if not request.config.launch.queue:
        return held_now(request, nodes)
    queued()

    def reach_again() -> tuple[LaunchRequest, Nodes]:
        return send_code(request, reach_while_scanning(request))

    return claims.wait_for_turn(request, nodes, reach_again, held_now)


def as_held(request: LaunchRequest, nodes: Nodes) -> LaunchRequest:
    """Return the launch without claims if its nodes come from a scheduler, which holds the GPUs."""
    return request if isinstance(nodes.source, ListedNodes) else claims.without_claims(request)


def held_now(request: LaunchRequest, nodes: Nodes) -> tuple[LaunchRequest, Nodes]:
    """Choose the nodes of a job among these, and hold its GPUs there."""
    return request, selection.select_nodes(request, nodes, hold=True)


def create_directory(request: LaunchRequest, nodes: Nodes) -> Experiment:
    """Create the directory of a job; an interrupt before the job is recorded removes it."""
    interrupt.hold_interrupts()
    experiment = nodes.source.experiment(request.where.experiments, request.config.launch.name)
    # This holds until the job is recorded.
    interrupt.undo_on_interrupt(experiment.discard)
    interrupt.answer_held_interrupts()
    job_log.write_log_to(experiment.head_log)
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


def start_job(prepared: Prepared, starting: JobRecord, first: Placement) -> Running:
    """Start a job that was recorded, and describe it in its manifest.

    `first` is the placement of its first node, which has the ports of ranks and supervisors.
    """
    request, nodes, planned = prepared.request, prepared.nodes, prepared.plan
    prepared.times["recorded"] = time.time()
    job_log.write_log_to(prepared.experiment.head_log)
    log.info("job %s is recorded in %s", planned.job, prepared.experiment.path)
    announce_plan(planned)
    tell(of_launch.Recorded(output.short_path(prepared.experiment.logs)))
    try:
        # The logs are opened first: after the start an error here would come too late.
        logs = open_logs(prepared.experiment, starting.nodes)
        if request.payload is not None:
            deliver_payload(nodes.reached, planned, request.payload)
        channels = [node.channel for node in nodes.reached]
        orders = [
            Start(spec=spec_of_node(request, planned, node, place))
            for node, place in zip(
                planned.nodes,
                placements_of_attempt(starting, first, planned.world_size),
                strict=True,
            )
        ]
        starting = start_all(starting, channels, orders)
        prepared.times["started"] = time.time()
        job_log.stop_holding_lines()
        log.info("all %d supervisors have started torchrun", len(orders))
        starting = replace(starting, spares=stand_by(prepared, starting, first))
    except NotStarted as error:
        log.info("the job could not be started: %s", error)
        record.record_failure(prepared.experiment, replace(starting, nodes=error.nodes), error)
        raise NodeError(error.table) from error
    except OrchestratorError as error:
        log.info("the job could not be started: %s", error)
        record.record_failure(prepared.experiment, starting, error)
        raise
    finally:
        # The manifest is written after the start: YAML takes 20 ms, git 10 ms or, in a large
        # tree, seconds.
        for spare in nodes.spares:
            spare.channel.connection.close()
        if problem := record.describe_job(prepared):
            tell(of_launch.RecordIncomplete(problem))
    running = record.record_start(prepared.experiment, starting)
    return Running(prepared.experiment, nodes.transport, running, channels, logs)


def stand_by(prepared: Prepared, starting: JobRecord, first: Placement) -> list[NodeRecord]:
    """Send each spare its job spec if restarts are allowed; return the spares that have it.

    Only the first launch can do so, as no record has the values of secrets.
    """
    request, spares = prepared.request, prepared.nodes.spares
    if not (request.config.launch.max_restarts and spares):
        return []
    if request.payload is not None or request.accelerate is not None:
        tell(of_launch.SparesUnused())
        return []

    def give(numbered: tuple[int, Reached]) -> NodeRecord:
        index, spare = numbered
        planned = spare_plan(prepared, spare, index)
        node = record.node_record(planned)
        [place] = placements_of_attempt(
            replace(starting, nodes=[node]), first, prepared.plan.world_size
        )
        order = Start(spec=spec_of_node(request, prepared.plan, planned, place), later=True)
        shared = spare.channel.ask(order, ANSWER_SECONDS).shared
        return replace(node, state="standing by", shared=shared)

    results = fleet.map_parallel(list(enumerate(spares, len(prepared.plan.nodes))), give)
    for node, error in failures.failed_nodes([spare.node for spare in spares], results):
        tell(of_launch.SpareRefused(node.name, error.what))
    standing = [result for result in results if isinstance(result, NodeRecord)]
    if standing:
        names = join_names([node.name for node in standing])
        tell(of_launch.SparesStandBy(plural(len(standing), "spare node"), names))
    return standing


def check_python(nodes: Sequence[ProbedNode]) -> None:
    """Raise if a node has another Python version: a pickled function is bytecode of this one."""
    mine = ".".join(map(str, sys.version_info[:2]))
    others = [
        f"{node.name} ({node.facts.python_version}, {node.facts.python})"
        for node in nodes
        if node.facts.python_version.split(".")[:2] != mine.split(".")
    ]
    if others:
        raise CheckFailed(
            f"a function can be sent only to the same Python, which is {mine} here:\n"
            f"    {', '.join(others)}",
            f"name a Python {mine} that has torch: python=/path in the list, or python='/path'; "
            "or write a script, and launch that",
        )


def deliver_payload(reached: Sequence[Reached], plan: Plan, directory: Path) -> None:
    """Send the payload to all nodes before the first one starts, so that no rank waits for it."""
    tree = tree_of_files(directory, lambda _: 0o600)
    places = [RemoteDir(kind=HANDED, job=plan.job, part=part.index) for part in plan.nodes]
    results = send_to_all([node.channel for node in reached], places, tree)
    raise_if_stopped(results)
    failures.results_or_error([node.node for node in reached], results, "; nothing was started")


def announce_plan(plan: Plan) -> None:
    """Report the notes of the plan, then the nodes, ranks, master and kind of start."""
    for note in plan.notes:
        tell(of_launch.PlanNote(note))
    node = plan.nodes[0]
    count = int(node.env["NNODES"])
    ranks = f"{plural(count, 'node')}, {plural(plan.world_size, 'rank')}"
    # With run-node, the other nodes are started by hand elsewhere.
    if len(plan.nodes) < count:
        own = f"ranks {node.first_rank} to {node.last_rank}"
        own = own if node.nproc > 1 else f"rank {node.first_rank}"
        ranks = f"node {node.index} of {count}: {own} of {plan.world_size}"
    tell(of_launch.Planned(ranks, plan.master, plan.start))


# -- the next attempts --------------------------------------------------------------------------


def launch_again(
    experiment: Experiment,
    ended: JobRecord,
    transport: Transport,
    channels: Mapping[int, NodeChannel],
) -> Running | JobRecord:
    """Start attempts until one runs and return it, or return the record of a job that is over."""
    # The first attempt is started sooner without this import.
    from orchestrator.head.follow.conclusion import after_attempt

    gathering = Gathering(experiment, ended, transport, channels)
    while True:
        gathered = Gathered(ended.nodes, (), ended.spares)
        log.info("attempt %d has ended; gathers the nodes of the next one", ended.attempt)
        try:
            gathered = gathering.run()
            log.info("the next attempt has %s", [node.name for node in gathered.nodes])
            bring_saved(experiment, transport, ended, gathered)
            return start_again(experiment, transport, ended, gathered)
        except NotBack as error:
            final = record.lost_record(ended, error)
            tell(of_launch.JobGivenUp(error.what))
        except OrchestratorError as error:
            log.info("the next attempt could not be started: %s", error)
            nodes = error.nodes if isinstance(error, NotStarted) else gathered.nodes
            failed = record.failed_record(ended, nodes, gathered.spares, error)
            final = after_attempt(experiment, failed)
            if not isinstance(error, StoppedEarly):
                tell(of_launch.AttemptRefused(final.attempt, str(error)))
        try:
            experiment.write_signed(final)
        except OSError as error:
            tell(of_job.FileUnwritable("job.json", str(error.strerror)))
        if final.over:
            return final
        ended = gathering.record = final


def bring_saved(
    experiment: Experiment, transport: Transport, ended: JobRecord, gathered: Gathered
) -> None:
    """Send the nodes the metrics of their ranks, and the files of the job's master they lack."""
    # Most jobs have only one attempt.
    from orchestrator.head.transfer.job_files import JobPeer, bring_job_files, bring_metrics

    def peer_of(node: NodeRecord, channel: NodeChannel) -> JobPeer:
        return JobPeer(node.name, channel, (ended.job, node.part), node.shared)

    peers = list(map(peer_of, gathered.nodes, gathered.channels))
    last, nproc = (
        ended.latest[0].nodes,
        {one.name: one.nproc for one in (*ended.nodes, *ended.spares)},
    )
    before = [name for name in last for _ in range(nproc[name])]
    bring_metrics(experiment.path / "outputs", before, gathered.nodes, peers)
    # The engine's ranks send each other their checkpoints.
    if ended.engine:
        return
    spares = {node.name: node for node in gathered.spares if node.state != "lost"}
    opened: list[JobPeer] = []

    def reach(name: str) -> JobPeer | None:
        """Connect to a node that the next attempt does not use; return None if it is away."""
        if name not in spares:
            return None
        with contextlib.suppress(OrchestratorError):
            opened.append(peer_of(spares[name], open_serving_channel(transport, spares[name])))
            return opened[-1]
        return None

    stopped = partial(refuse_if_stopped, experiment)
    try:
        bring_job_files(peers, last, reach, resolved.output_directories(experiment.path), stopped)
    finally:
        for peer in opened:
            peer.channel.connection.close()


def start_again(
    experiment: Experiment, transport: Transport, ended: JobRecord, gathered: Gathered
) -> Running:
    """Record the next attempt, and start it on every node or on none."""
    number, most = len(ended.attempts) + 1, 1 + ended.launch.max_restarts
    begins = of_launch.AttemptBegins(number, most, ended.attempts[-1].why)
    tell(begins)
    ports = take_ports(ended, gathered)
    nodes, spares = gathered.nodes, gathered.spares
    starting = record.record_again(experiment, ended, nodes, spares, ports.port, begins.words())
    logs = open_logs(experiment, starting.nodes)
    refuse_if_stopped(experiment)
    # The ranks are told how many there were in the first attempt, to keep the global batch size.
    nproc = {node.name: node.nproc for node in (*starting.nodes, *starting.spares)}
    ranks = sum(nproc[name] for name in starting.attempts[0].nodes)
    address = starting.nodes[0].address
    orders = [
        Start(place=place)
        for place in placements_of_attempt(
            starting, first_placement(starting, address, ports), ranks
        )
    ]
    starting = start_all(starting, gathered.channels, orders)
    log.info("attempt %d runs", number)
    running = record.record_start(experiment, starting)
    return Running(experiment, transport, running, gathered.channels, logs)


def take_ports(ended: JobRecord, gathered: Gathered) -> TakenPorts:
    """Reserve new ports on the first node: a straggler must not connect to the new ranks."""
    chosen = ended.launch.master_port
    before = int(ended.master.rpartition(":")[2] or DEFAULT_PORT)
    after = before + 1 if before < LAST_PORT else DEFAULT_PORT
    wanted = PortRequest(
        wanted=chosen or after,
        exact=chosen is not None,
        peers=len(gathered.nodes) > 1,
    )
    ports = gathered.channels[0].ask(TakePorts(port=wanted), QUICK_ANSWER_SECONDS)
    if not ports.port:
        raise CheckFailed(f"no port from {wanted.wanted} on is free on {gathered.nodes[0].name}")
    return ports


# -- common to all attempts -------------------------------------------------------------------


class NotStarted(NodeError):
    """A node did not start its part of the job; `nodes` has the records after the failed start."""

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
) -> JobRecord:
    """Start the supervisors of all nodes at once; if one fails, end the others and raise.

    Return the record with what the nodes have found of their disks.
    """
    parts = list(zip(channels, orders, starting.nodes, strict=True))
    log.info("starts the supervisors of %s", starting.job)

    def ask(part: tuple[NodeChannel, Start, NodeRecord]) -> StartedHere:
        return part[0].ask(part[1], start_patience(starting.launch))

    def end(part: tuple[NodeChannel, Start, NodeRecord]) -> Message:
        order = End(
            job=starting.job,
            part=part[2].part,
            attempt=starting.attempt,
            why="not started",
            grace=0.0,
        )
        return part[0].ask(order, QUICK_ANSWER_SECONDS)

    with counted_work("starting", ask, parts) as counting:
        results = fleet.map_parallel(parts, counting)
    if any(isinstance(result, OrchestratorError) for result in results):
        log.info("a node has not started its part: ends the others again")
        ended = fleet.map_parallel(parts, end)
        raise_if_stopped(results)
        failed, lost = list[tuple[NodeRecord, OrchestratorError]](), set[str]()
        for node, result, answer in zip(starting.nodes, results, ended, strict=True):
            # A node that did not decline may have started its part.
            begun = isinstance(result, StartedHere | NodeError) and not isinstance(result, Declined)
            if isinstance(answer, OrchestratorError) and begun:
                lost.add(node.name)
                failed.append((node, NodeError(answer.what, IN_DOUBT)))
            elif isinstance(result, OrchestratorError):
                failed.append((node, result))
        raise NotStarted(starting.nodes, failed, lost)
    answers = [result for result in results if isinstance(result, StartedHere)]
    tell_how_warm(starting.nodes, answers)
    pairs = zip(starting.nodes, answers, strict=True)
    return replace(starting, nodes=[replace(node, shared=answer.shared) for node, answer in pairs])


def tell_how_warm(nodes: Sequence[NodeRecord], started: Sequence[StartedHere]) -> None:
    """Report which nodes started from warm processes, and why others that should have did not."""
    pairs = list(zip(nodes, started, strict=True))
    warm = [node.name for node, answer in pairs if answer.warm]
    if warm:
        tell(of_launch.WarmStart("all nodes" if len(warm) == len(nodes) else ", ".join(warm)))
    for line in lines_by_node([(node.name, answer.why_cold) for node, answer in pairs]):
        tell(of_launch.ColdStart(line))


def raise_if_stopped(results: Sequence[object]) -> None:
    """Raise StoppedEarly if a node declined a request because the job has been stopped."""
    for result in results:
        if isinstance(result, Declined) and result.kind == STOPPED:
            raise StoppedEarly(result.what)
