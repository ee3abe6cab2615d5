"""`orchestrator nodes` and `doctor`: what the machines of the node list are, and who holds them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from orchestrator.common import text
from orchestrator.common.errors import (
    EXIT_CHECK,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    OrchestratorError,
)
from orchestrator.common.text import format_bytes, format_duration
from orchestrator.config.launch import LaunchArguments, Where
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached, ask_node
from orchestrator.head.doctor import examination
from orchestrator.head.nodes import machine
from orchestrator.head.nodes.facts import lines_by_node
from orchestrator.head.nodes.machine import Machine
from orchestrator.head.nodes.node_list import Node, read_nodes
from orchestrator.head.screen import failures, output, styles
from orchestrator.head.screen.output import PLAIN, Cell, Column, Table, Terminal
from orchestrator.head.start.code import expect_code
from orchestrator.head.start.nodes import try_nodes
from orchestrator.head.start.request import LaunchRequest, resolve_request
from orchestrator.head.start.selection import diagnose_job
from orchestrator.head.status import status
from orchestrator.head.status.status import transport_without_record
from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.message import encode_value
from orchestrator.protocol.requests.claims import WAITING, ClaimEntry, devices_in_words
from orchestrator.protocol.requests.machine import Examine
from orchestrator.protocol.requests.start import LockTableState, ReadLockTable
from orchestrator.protocol.requests.warm import StandbyEnds, StandbyStates, Warm, WarmOff
from orchestrator.protocol.timing import ANSWER_SECONDS, QUICK_ANSWER_SECONDS


def name_of(node: Machine) -> str:
    """Return the machine's name, marked as spare where it is."""
    return f"{node.name}{' (spare)' * node.spare}"


MACHINES: Table[Machine] = Table(
    (
        Column("NODE", name_of, absent=lambda node: (name_of(node), styles.FAILED)),
        Column(
            "HOST",
            lambda node: node.hostname,
            absent=lambda _: ("unreachable", styles.FAILED),
            least=11,
        ),
        Column("CPUS", lambda node: str(node.cpus), drop=4),
        Column("MEMORY", lambda node: text.format_bytes(node.memory, binary=True), drop=3),
        Column("DISK FREE", machine.disk_text, drop=2),
        Column("TORCH", lambda node: node.torch or ("none", styles.WARNING), drop=1, least=6),
        Column("GPUS", machine.gpu_text, least=10),
        Column("DRIVER", lambda node: node.driver or "-", drop=6),
        Column("NETWORK", machine.network_text, drop=5, least=16),
    ),
    is_absent=lambda node: not node.reached,
)
SITE: Column[Machine] = Column(
    "SITE", lambda node: node.site or "-", absent=lambda node: node.site or "-", drop=7
)


def list_nodes(arguments: LaunchArguments) -> int:
    machines = find_machines(resolve_request(arguments))
    data = {"nodes": [machine.machine_to_json(node) for node in machines]}
    output.print_result(data, partial(to_text, machines))
    return EXIT_DONE if all(node.reached for node in machines) else EXIT_NODE


def find_machines(request: LaunchRequest) -> list[Machine]:
    """Reach all nodes at once and describe each, in the order of the list."""
    answered = try_nodes(request)
    with_gpus = [node for node in answered.reached if node.probed.facts.gpus]
    names = [node.node.name for node in with_gpus]
    checkups = dict(zip(names, examine_nodes(with_gpus, "gpus"), strict=True))
    known = {node.name: machine.lost_machine(node, error) for node, error in answered.lost}
    for node in answered.reached:
        checkup = checkups.get(node.node.name)
        tool = checkup if isinstance(checkup, Checkup) else None
        known[node.node.name] = machine.describe_machine(node.probed, tool)
    return [known[node.name] for node in answered.source.nodes]


def examine_nodes(nodes: Sequence[Reached], *parts: str) -> list[Checkup | OrchestratorError]:
    """Return each node's checkup of the named parts, or the error of that node."""
    questions = [Examine(workdir="/", parts=parts)] * len(nodes)
    return fleet.ask_nodes(nodes, questions, ANSWER_SECONDS)


def to_text(machines: Sequence[Machine], terminal: Terminal = PLAIN) -> str:
    """Return the table of machines, with the reasons for missing nodes."""
    lost = [node for node in machines if not node.reached]
    sited = [SITE] * any(node.site for node in machines)
    shown = replace(MACHINES, columns=(*MACHINES.columns, *sited))
    parts = [shown.text(machines, terminal)]
    parts += [output.printable_text(lost_reasons(lost, len(machines)))] * bool(lost)
    return "\n\n".join(parts)


def lost_reasons(lost: Sequence[Machine], total: int) -> str:
    """Return a text: how many nodes could not be reached, and the reasons."""
    lines = failures.failure_lines((node.name, node.problem, node.fix) for node in lost)
    return "\n  ".join([f"{len(lost)} of {text.plural(total, 'node')} cannot be reached", *lines])


# -- doctor: what is wrong with them ---------------------------------------------------------------


def run_doctor(arguments: LaunchArguments, *, full: bool, hints: bool) -> int:
    request = resolve_request(arguments)
    request, nodes = expect_code(request, try_nodes(request))
    diagnosis = diagnose_job(request, nodes, full=full)
    words = partial(examination.diagnosis_to_text, diagnosis, hints=hints)
    output.print_result(examination.diagnosis_to_json(diagnosis), words)
    return EXIT_CHECK if diagnosis.bad else EXIT_DONE


# -- --queue: who holds what of the nodes, and who waits for it ------------------------------------


@dataclass(frozen=True)
class NodeLine:
    """A job or a launch that waits, on all nodes where it has an entry."""

    entry: ClaimEntry
    # The keys are the names of the nodes.
    on: Mapping[str, ClaimEntry]
    # The position in the queue; 0: the request is granted.
    place: int = 0

    @property
    def waits(self) -> bool:
        return self.entry.state == WAITING


def state(line: NodeLine) -> Cell:
    if line.waits:
        return f"waits, {line.place}.", styles.WARNING
    return line.entry.state


def what(line: NodeLine) -> str:
    """Return the GPUs or slots that a job holds or requests, node by node, as text."""
    each = {
        name: f"{one.wants} wanted" if line.waits else devices_in_words(one.names)
        for name, one in line.on.items()
    }
    return "; ".join(lines_by_node(each.items()))


LINES: Table[NodeLine] = Table(
    (
        Column("STATE", state),
        Column("USER", lambda line: line.entry.user, least=8),
        Column("JOB", lambda line: line.entry.job, least=12),
        Column("ON", what, least=12),
        Column(
            "SINCE",
            lambda line: text.format_duration(round(max(0.0, time.time() - line.entry.since))),
            drop=1,
        ),
    )
)


Lost = Sequence[tuple[str, OrchestratorError]]


def read_lock_tables(
    arguments: LaunchArguments,
) -> tuple[list[tuple[Reached, LockTableState]], Lost]:
    """Return the lock tables of the nodes that answer, and the errors of the others."""
    answered = try_nodes(resolve_request(arguments))
    states = fleet.ask_nodes(
        answered.reached, [ReadLockTable()] * len(answered.reached), QUICK_ANSWER_SECONDS
    )
    pairs = list(zip(answered.reached, states, strict=True))
    read = [(node, state) for node, state in pairs if isinstance(state, LockTableState)]
    silent = [(node.node, state) for node, state in pairs if isinstance(state, OrchestratorError)]
    return read, [(node.name, error) for node, error in (*answered.lost, *silent)]


def show_queue(arguments: LaunchArguments) -> int:
    read, lost = read_lock_tables(arguments)
    lines = list(lines_of((node.node.name, state.entries) for node, state in read))
    data = {
        "jobs": [queue_line(line) for line in lines],
        "lost": [{"name": name, "problem": error.what} for name, error in lost],
    }
    output.print_result(data, partial(queue_text, lines, lost))
    return EXIT_NODE if lost else EXIT_DONE


def lines_of(read: Iterable[tuple[str, Sequence[ClaimEntry]]]) -> Iterator[NodeLine]:
    """Yield the jobs that hold something, and then who waits, the first in the queue first."""
    found: dict[tuple[str, ...], dict[str, ClaimEntry]] = {}
    for node, entries in read:
        for entry in entries:
            found.setdefault(whole(entry), {})[node] = entry
    firsts = {key: next(iter(on.values())) for key, on in found.items()}
    for one in sorted(firsts.values(), key=lambda entry: entry.since):
        if one.state != WAITING:
            yield NodeLine(one, found[whole(one)])
    waiting = sorted(
        (one for one in firsts.values() if one.state == WAITING), key=lambda one: one.rank
    )
    for at, one in enumerate(waiting, 1):
        yield NodeLine(one, found[whole(one)], place=at)


def whole(entry: ClaimEntry) -> tuple[str, ...]:
    """Return what the entries of one job, or of one launch that waits, have in common."""
    return (entry.id,) if entry.state == WAITING else (entry.user, entry.job)


def queue_line(line: NodeLine) -> dict[str, Any]:
    entry = line.entry
    return {
        "id": entry.id,
        "state": entry.state,
        "user": entry.user,
        "job": entry.job,
        "head": entry.head,
        "since": entry.since,
        "place": line.place or None,
        "nodes": {
            name: {"holds": list(one.names), "wants": one.wants} for name, one in line.on.items()
        },
    }


def queue_text(lines: Sequence[NodeLine], lost: Lost, terminal: Terminal) -> str:
    table = LINES.text(lines, terminal) if lines else "no job holds or waits for these nodes"
    reasons = failures.failure_lines((name, error.what, error.fix) for name, error in lost)
    return "\n\n".join(filter(None, [table, "\n".join(reasons)]))


# -- --warm: the processes that wait for a job on the nodes ----------------------------------------

# The table has this many columns beside the node's name.
COLUMNS = 4

Answer = StandbyStates | StandbyEnds | OrchestratorError
Replies = Sequence[tuple[Node, Answer]]


def warm_processes(where: Where, *, off: bool) -> int:
    """Show the warm processes on each node and in its containers, or end them with proof."""
    ssh = transport_without_record(where)
    nodes = read_nodes(where.node_list)
    places = [*nodes, *status.containers_of(nodes, where, status.may_be_warm)]

    def ask(node: Node) -> StandbyStates | StandbyEnds:
        if off:
            return ask_node(ssh, node, WarmOff(), ANSWER_SECONDS)
        return ask_node(ssh, node, Warm(), ANSWER_SECONDS)

    answers: Replies = list(zip(places, fleet.map_parallel(places, ask), strict=True))
    output.print_result(warm_data(answers), partial(warm_text, answers))
    if any(isinstance(answer, StandbyEnds) and answer.left for _, answer in answers):
        return EXIT_FAILED
    lost = any(isinstance(answer, OrchestratorError) for _, answer in answers)
    return EXIT_NODE if lost else EXIT_DONE


def warm_text(answers: Replies, terminal: Terminal) -> str:
    """Return a line for each process that waits or was ended, and for each node without one."""
    errors = [(node, answer) for node, answer in answers if isinstance(answer, OrchestratorError)]
    reasons = failures.failure_lines((node.place, error.what, error.fix) for node, error in errors)
    rows = [
        [node.place, *words, *[""] * (COLUMNS - len(words))]
        for node, answer in answers
        for words in words_of(answer)
    ]
    return "\n".join([output.format_table(rows, terminal), *map(output.printable_text, reasons)])


def words_of(answer: Answer) -> Iterator[list[str]]:
    if isinstance(answer, StandbyEnds):
        ended = ", ".join(map(str, answer.ended))
        left = ", ".join(map(str, answer.left))
        yield [f"ended {ended}" if ended else "nothing was warm"]
        yield from [[f"processes {left} do not end (stuck in the kernel?)"]] * bool(left)
    elif isinstance(answer, StandbyStates):
        for each in answer.standbys:
            left = f"{format_duration(round(each.seconds_left))} left"
            state = "warm" if each.ready else "importing"
            yield [state, left, format_bytes(each.memory, binary=True), each.python]
        if not answer.standbys:
            yield ["cold"]


def warm_data(answers: Replies) -> dict[str, object]:
    rows: list[dict[str, object]] = []
    for node, answer in answers:
        place = {"node": node.name, "wrap": node.wrap} if node.wrap else {"node": node.name}
        if isinstance(answer, OrchestratorError):
            rows.append({**place, "state": "unreachable", "why": answer.what})
            continue
        data = encode_value(answer, nones=True)
        rows.append({**place, **({"warm": data["standbys"]} if "standbys" in data else data)})
    return {"nodes": rows}
