"""A further attempt of a job: gather its nodes again, bring what they lack, start.

It is one more turn of the line in head/start/launch.py, with fewer questions. Each node has the
program, the code and the environment with its secrets from the attempt before, so that any head can
start it, and is told only its place among the others.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import partial

from orchestrator.common.errors import CheckFailed, OrchestratorError, StoppedEarly
from orchestrator.config import resolved
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import serving
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.conclusion import after_attempt
from orchestrator.head.follow.streams.node_logs import open_logs
from orchestrator.head.plan.plan import DEFAULT_PORT
from orchestrator.head.screen.output import say
from orchestrator.head.screen.styles import WARNING, styled
from orchestrator.head.start import record
from orchestrator.head.start.launch import NotStarted, start_all
from orchestrator.head.start.parts import Meeting, places
from orchestrator.head.start.record import Running
from orchestrator.head.start.recovery.gather import (
    Gathered,
    Gathering,
    NotBack,
    refuse_if_stopped,
)
from orchestrator.head.transfer.job_files import JobPeer, bring_job_files
from orchestrator.protocol.requests.machine import PortWish
from orchestrator.protocol.requests.start import Start, TakenPorts, TakePorts
from orchestrator.protocol.timing import QUICK_ANSWER_SECONDS
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

log = logging.getLogger(__name__)

LAST_PORT = 60_000


def launch_again(
    experiment: Experiment,
    ended: JobRecord,
    transport: Transport,
    channels: Mapping[int, NodeChannel],
) -> Running | JobRecord:
    """Start attempts until one runs, and return it; or the record of a job that is over."""
    gathering = Gathering(experiment, ended, transport, channels)
    while True:
        gathered = Gathered(ended.nodes, (), ended.spares)
        log.info("attempt %d has ended; gathers the nodes of the next one", ended.attempt)
        try:
            gathered = gathering.run()
            log.info("the next attempt has %s", [node.name for node in gathered.nodes])
            bring_saved(experiment, transport, ended, gathered)
            return start_again(experiment, ended, gathered)
        except NotBack as error:
            final = record.given_up(ended, error)
            say(f"{error.what}; the job is given up")
        except OrchestratorError as error:
            log.info("the next attempt could not be started: %s", error)
            nodes = error.nodes if isinstance(error, NotStarted) else gathered.nodes
            failed = record.failed_to_start(ended, nodes, gathered.spares, error)
            final = after_attempt(experiment, failed)
            if not isinstance(error, StoppedEarly):
                say(f"attempt {ended.attempt} could not be started: {error}")
        try:
            experiment.write_signed(final)
        except OSError as error:
            say(f"job.json cannot be written: {error.strerror}")
        if final.over:
            return final
        ended = gathering.record = final


def bring_saved(
    experiment: Experiment, transport: Transport, ended: JobRecord, gathered: Gathered
) -> None:
    """Give the nodes what they lack of what the job's master wrote."""
    if ended.engine:  # its ranks bring each other their checkpoints
        return
    spares = {node.name: node for node in gathered.spares if node.state != "lost"}
    opened: list[JobPeer] = []

    def reach(name: str) -> JobPeer | None:
        """Connect to a node that the next attempt leaves; None if it is not there."""
        if name not in spares:
            return None
        with contextlib.suppress(OrchestratorError):
            opened.append(peer_of(ended, spares[name], serving(transport, spares[name])))
            return opened[-1]
        return None

    peers = list(map(partial(peer_of, ended), gathered.nodes, gathered.channels))
    last, stopped = ended.latest[0].nodes, partial(refuse_if_stopped, experiment)
    try:
        bring_job_files(peers, last, reach, resolved.outputs(experiment.path), stopped)
    finally:
        for peer in opened:
            peer.channel.connection.close()


def peer_of(ended: JobRecord, node: NodeRecord, channel: NodeChannel) -> JobPeer:
    return JobPeer(node.name, channel, ended.first_part(node))


def start_again(experiment: Experiment, ended: JobRecord, gathered: Gathered) -> Running:
    """Record the next attempt, and start it on every node or on none."""
    number, most = len(ended.attempts) + 1, 1 + ended.launch.max_restarts
    line = f"attempt {number} of at most {most} ({ended.attempts[-1].why})"
    say(styled(line, WARNING))
    ports = take_ports(ended, gathered)
    nodes, spares = gathered.nodes, gathered.spares
    starting = record.record_again(experiment, ended, nodes, spares, ports.port, line)
    logs = open_logs(experiment, starting.nodes)
    refuse_if_stopped(experiment)
    # With how many ranks the job began: those that it has now keep its batch.
    nproc = {node.name: node.nproc for node in (*starting.nodes, *starting.spares)}
    ranks = sum(nproc[name] for name in starting.attempts[0].nodes)
    address = starting.nodes[0].address
    orders = [
        Start(place=place) for place in places(starting, Meeting(address, address, ports), ranks)
    ]
    start_all(starting, gathered.channels, orders)
    log.info("attempt %d runs as job %s", number, starting.job)
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
    ports = gathered.channels[0].ask(TakePorts(port=wanted), QUICK_ANSWER_SECONDS)
    if not ports.port:
        raise CheckFailed(f"no port from {wanted.wanted} on is free on {gathered.nodes[0].name}")
    return ports
