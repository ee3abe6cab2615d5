"""Starts the next attempt of a job on the nodes that it had.

It is a job of its own there, in the same experiment. Each node has all that it needs from the
attempt before: the environment with its secrets, the program, the code. So any head can do it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from orchestrator.common.errors import CheckFailed, OrchestratorError, StoppedEarly, UsageError
from orchestrator.common.text import Say
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow import verdict
from orchestrator.head.follow.node_logs import NodeLogs, open_logs
from orchestrator.head.start import checkpoints, lone_files, policy, separator
from orchestrator.head.start.gather import (
    Gathered,
    Gathering,
    NotBack,
    bounds_of,
    first_error,
    prove_the_end,
    refuse_if_stopped,
)
from orchestrator.head.start.judge import judged
from orchestrator.protocol.requests.follow import End
from orchestrator.protocol.requests.machine import PortWish
from orchestrator.protocol.requests.request import STOPPED
from orchestrator.protocol.requests.start import StartAgain, StartedHere, TakenPorts, TakePorts
from orchestrator.protocol.spec import Attempt
from orchestrator.records.experiment import (
    NOT_STARTED,
    Experiment,
    JobRecord,
    NodeRecord,
    this_head,
)

START_TIMEOUT = 30.0
END_TIMEOUT = 10.0
DEFAULT_PORT = 29500
PORT_SECONDS = 10.0
LAST_PORT = 60_000


@dataclass(frozen=True)
class Begun:
    """An attempt that runs on all its nodes now, with open channels to them."""

    record: JobRecord
    channels: Sequence[NodeChannel]
    logs: Sequence[NodeLogs]


def again(
    experiment: Experiment,
    record: JobRecord,
    transport: Transport,
    channels: Mapping[int, NodeChannel],
    say: Say,
) -> Begun | JobRecord:
    """Start attempts until one runs, and return it; or the record of a job that is over."""
    gathering = Gathering(experiment, record, transport, channels, say)
    while True:
        gathered = None
        try:
            gathered = gathering.run()
            prove_the_end(record, gathered)
            checkpoints.bring(experiment, record, gathered, transport, say)
            stopped = partial(refuse_if_stopped, experiment)
            lone_files.bring(experiment, record, gathered, say, stopped)
            return start(experiment, record, gathered, say)
        except NotBack as error:
            final = given_up(record, error)
            say(f"{error.what}; the job is given up")
        except OrchestratorError as error:
            final = judged(experiment, failed_to_start(record, gathered, error))
            if not isinstance(error, StoppedEarly):
                say(f"attempt {record.attempt} could not be started: {error}")
        try:
            experiment.write_signed(final)
        except OSError as error:
            say(f"job.json cannot be written: {error.strerror}")
        if final.over:
            return final
        record = gathering.record = final


def given_up(record: JobRecord, error: OrchestratorError) -> JobRecord:
    """Return the record of a job whose nodes are not all there any more."""
    last = replace(record.attempts[-1], restarted=False, why=error.what)
    return replace(
        record,
        state="lost",
        exit_code=error.exit_code,
        ended=time.time(),
        verdict=last.verdict,
        attempts=[*record.attempts[:-1], last],
    )


def failed_to_start(
    record: JobRecord, gathered: Gathered | None, error: OrchestratorError
) -> JobRecord:
    """Return the record of an attempt that came to nothing, on the nodes that it was to have."""
    now, stopped = time.time(), isinstance(error, StoppedEarly)
    nodes, spares = record.nodes, record.spares
    if gathered is not None:
        nodes, spares = list(gathered.nodes), list(gathered.spares)
    return replace(
        record,
        job=next_job(record),
        state="stopped" if stopped else "failed",
        exit_code=error.exit_code,
        ended=now,
        verdict=(verdict.stopped if stopped else verdict.not_started)(error.what, now),
        nodes=[replace(node, state=NOT_STARTED, ranks={}, times={}) for node in nodes],
        spares=spares,
    )


def next_job(record: JobRecord) -> str:
    return f"{record.attempts[0].job}.{len(record.attempts) + 1}"


def start(experiment: Experiment, record: JobRecord, gathered: Gathered, say: Say) -> Begun:
    """Record the next attempt, and start it on every node or on none."""
    number = len(record.attempts) + 1
    most = policy.attempts_allowed(record.attempts, record.launch.max_restarts)
    line = f"attempt {number} of at most {most} ({record.attempts[-1].why})"
    say(line)
    ports = take_ports(record, gathered)
    starting = written(experiment, record, gathered, ports.port, line)
    logs = open_logs(experiment, starting.nodes)
    refuse_if_stopped(experiment)
    token = secrets.token_hex(32)
    orders = [
        StartAgain(
            job=starting.job,
            node=node.index,
            port=ports.port,
            peers_port=ports.peers_port,
            token=token,
            nnodes=len(starting.nodes),
            first_rank=node.first_rank,
            master=starting.nodes[0].address,
            attempt=Attempt(
                number=number,
                restarts=most - 1 + (len(starting.nodes) < bounds_of(record)[1]),
                first_job=node.first_job,
                first_node=node.first_node,
                log=node.log_before,
                ranks=ranks_at_first(starting),
            ),
        )
        for node in starting.nodes
    ]
    started = start_all(starting, gathered, orders)
    say_how_warm(starting.nodes, started, say)
    nodes = [replace(node, state="running") for node in starting.nodes]
    running = replace(starting, state="running", nodes=nodes)
    with contextlib.suppress(OSError):  # a full disk: the head that follows it tries again
        experiment.write_record(running)
    return Begun(running, gathered.channels, logs)


def ranks_at_first(record: JobRecord) -> int:
    """Return with how many ranks the job began: those that it has now keep its batch."""
    nproc = {node.name: node.nproc for node in (*record.nodes, *record.spares)}
    return sum(nproc[name] for name in record.attempts[0].nodes)


def take_ports(record: JobRecord, gathered: Gathered) -> TakenPorts:
    """Take fresh ports on the first node: a straggler must not meet the new ranks."""
    chosen = record.launch.master_port
    before = int(record.master.rpartition(":")[2] or DEFAULT_PORT)
    after = before + 1 if before < LAST_PORT else DEFAULT_PORT
    wish = PortWish(wanted=chosen or after, exact=chosen is not None, peers=len(gathered.nodes) > 1)
    ports = gathered.channels[0].ask(TakePorts(port=wish), PORT_SECONDS)
    if not ports.port:
        raise CheckFailed(f"no port from {wish.wanted} on is free on {gathered.nodes[0].name}")
    return ports


def written(
    experiment: Experiment, record: JobRecord, gathered: Gathered, port: int, line: str
) -> JobRecord:
    """Write down that the next attempt starts, and a line about it into each log."""
    nodes = [
        separator.begin(
            experiment,
            replace(
                node,
                state="starting",
                exit_code=None,
                ranks={},
                times={},
                clock=0.0,
                log_before=0,
                ranks_before=0,
            ),
            line,
        )
        for node in gathered.nodes
    ]
    starting = replace(
        record,
        job=next_job(record),
        state="starting",
        nodes=nodes,
        spares=list(gathered.spares),
        master=f"{nodes[0].address}:{port}",
        head=this_head(),
    )
    try:
        experiment.write_signed(starting)
    except OSError as error:
        raise UsageError(f"{experiment.path} cannot be written: {error.strerror}") from error
    return starting


def start_all(
    record: JobRecord, gathered: Gathered, orders: Sequence[StartAgain]
) -> list[StartedHere]:
    """Start all parts at once; if one cannot start, end the others again."""
    pairs = list(zip(gathered.channels, orders, strict=True))
    results = fleet.everywhere(pairs, lambda pair: pair[0].ask(pair[1], START_TIMEOUT))
    started = [result for result in results if not isinstance(result, OrchestratorError)]
    if len(started) == len(results):
        return started
    ends = [End(job=record.job, node=n.index, why="not started", grace=0.0) for n in record.nodes]
    fleet.everywhere(
        list(zip(gathered.channels, ends, strict=True)),
        lambda pair: pair[0].ask(pair[1], END_TIMEOUT),
    )
    for result in results:
        if isinstance(result, Declined) and result.kind == STOPPED:
            raise StoppedEarly(result.what)
    raise first_error(record.nodes, results)


def say_how_warm(nodes: Sequence[NodeRecord], started: Sequence[StartedHere], say: Say) -> None:
    """Say from where the ranks start, and why some start cold; once for all that start alike."""
    names: dict[str, list[str]] = {}
    for node, answer in zip(nodes, started, strict=True):
        how = "warm start" if answer.warm.warm else "cold start: nothing waited there yet"
        names.setdefault(answer.warm.why or how, []).append(node.name)
    for how, own in names.items():
        everywhere = how == "warm start" and len(names) == 1
        say(f"{how} on all nodes" if everywhere else f"{', '.join(own)}: {how}")
