"""Shows what the machines of the node list are, who uses them, and which launches pass over.

The commands `orchestrator nodes`, `who` and `node cordon|uncordon|list`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.common import text
from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_NODE,
    OrchestratorError,
    UsageError,
    nearest,
)
from orchestrator.common.hosts import folded
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes import clock, machine
from orchestrator.head.nodes.machine import Machine
from orchestrator.head.nodes.node_list import Node, choose, read_nodes
from orchestrator.head.screen import failures, output, styles
from orchestrator.head.screen.output import Cell, Column, Table, Terminal
from orchestrator.head.start.nodes import try_all
from orchestrator.head.start.request import Request, resolve
from orchestrator.protocol.facts import Checkup, Gpu, Holder
from orchestrator.protocol.message import encode
from orchestrator.protocol.requests.claims import RUNNING, Entry
from orchestrator.protocol.requests.machine import CheckedUp, Examine
from orchestrator.protocol.requests.start import Page, ReadBook
from orchestrator.protocol.timing import ANSWER_SECONDS, QUICK_ANSWER_SECONDS
from orchestrator.records import cordons
from orchestrator.records.machines import machine_of

LOST = styles.FAILED


def name_of(node: Machine) -> str:
    """Name a machine, and what sets it apart from those that the next launch takes."""
    return f"{node.name}{' (spare)' * node.spare}{' (cordoned)' * bool(node.cordoned)}"


MACHINES: Table[Machine] = Table(
    (
        Column("NODE", name_of, absent=lambda node: (name_of(node), LOST), merge=folded),
        Column(
            "HOST",
            lambda node: node.hostname,
            absent=lambda _: ("unreachable", LOST),
            merge=folded,
        ),
        Column("CPUS", lambda node: str(node.cpus)),
        Column("MEMORY", lambda node: text.size(node.memory, binary=True)),
        Column("DISK FREE", machine.disk_text, merge=text.span),
        Column("TORCH", lambda node: node.torch or ("none", styles.WARNING)),
        Column("GPUS", machine.gpu_text),
        Column("DRIVER", lambda node: node.driver or "-"),
        Column("NETWORK", machine.network_text),
    ),
    is_absent=lambda node: not node.reached,
    second=6,
)
SITE: Column[Machine] = Column(
    "SITE", lambda node: node.site or "-", absent=lambda node: node.site or "-"
)


def nodes(arguments: LaunchArguments) -> int:
    machines = find_machines(resolve(arguments))
    data = {"nodes": [machine.to_json(node) for node in machines]}
    output.result(data, partial(to_text, machines))
    return EXIT_DONE if all(node.reached for node in machines) else EXIT_NODE


def find_machines(request: Request) -> list[Machine]:
    """Reach all nodes at once and describe each, in the order of the list."""
    answered = try_all(request)
    with_gpus = [node for node in answered.reached if node.probed.facts.gpus]
    names = [node.node.name for node in with_gpus]
    checkups = dict(zip(names, examine(with_gpus, "gpus"), strict=True))
    known = {node.name: machine.lost(node, error) for node, error in answered.lost}
    for node in answered.reached:
        checkup = checkups.get(node.node.name)
        tool = checkup if isinstance(checkup, Checkup) else None
        known[node.node.name] = machine.machine(node.probed, tool)
    cordoned = cordons.read()
    return [
        known[node.name].replace(cordoned=cordons.words_of(node, cordoned))
        for node in answered.source.nodes
    ]


def examine(nodes: Sequence[Reached], *parts: str) -> list[Checkup | OrchestratorError]:
    """Have the nodes examine parts of themselves closely."""
    questions = [Examine(workdir="/", parts=parts)] * len(nodes)
    answers = fleet.ask(nodes, questions, ANSWER_SECONDS)
    return [a.checkup if isinstance(a, CheckedUp) else a for a in answers]


def to_text(machines: Sequence[Machine], terminal: Terminal) -> str:
    """Draw the table, and say why nodes are missing and which are cordoned."""
    lost = [node for node in machines if not node.reached]
    cordoned = [
        f"{node.name} is cordoned ({node.cordoned}): orchestrator node uncordon {node.name}"
        for node in machines
        if node.cordoned
    ]
    notes = [reasons(lost, len(machines)) if lost else "", "\n".join(cordoned)]
    sited = [SITE] * any(node.site for node in machines)
    shown = replace(MACHINES, columns=(*MACHINES.columns, *sited))
    parts = [shown.text(machines, terminal), *map(output.printable, notes)]
    return "\n\n".join(filter(None, parts))


def reasons(lost: Sequence[Machine], total: int) -> str:
    """Say how many nodes could not be reached, and why."""
    lines = failures.reasons((node.name, node.problem, node.fix) for node in lost)
    first = f"{len(lost)} of {text.plural(total, 'node')} cannot be reached"
    return "\n  ".join([first, *lines])


# -- who uses them --------------------------------------------------------------------------------

FREE = styles.DONE


@dataclass(frozen=True)
class Used:
    """Who uses one machine: what it answered, or why it could not be asked."""

    node: Node
    cpus: int = 0
    checkup: Checkup | None = None
    error: OrchestratorError | None = None
    entries: Sequence[Entry] = ()  # of the machine's book: who holds which GPUs


@dataclass(frozen=True)
class Use:
    """One user of one GPU, or of the processors of a machine; or that nobody uses it."""

    node: str
    gpu: str = ""
    user: Cell = "-"
    program: str = "-"
    since: str = "-"
    busy: str = "-"
    memory: str = "-"
    lost: bool = False  # the machine could not be reached


USERS: Table[Use] = Table(
    (
        Column("NODE", lambda use: use.node, absent=lambda use: (use.node, LOST), merge=folded),
        Column("GPU", lambda use: use.gpu, absent=lambda _: ("unreachable", LOST)),
        Column("USER", lambda use: use.user),
        Column("JOB OR PROGRAM", lambda use: use.program),
        Column("SINCE", lambda use: use.since, merge=text.span),
        Column("USE", lambda use: use.busy, merge=text.span),
        Column("MEMORY", lambda use: use.memory, merge=text.span),
    ),
    is_absent=lambda use: use.lost,
)


def who(arguments: LaunchArguments) -> int:
    users = find_users(resolve(arguments))
    data = {"nodes": [users_json(used) for used in users]}
    output.result(data, partial(users_text, users, time.time()))
    return EXIT_DONE if all(used.error is None for used in users) else EXIT_NODE


def find_users(request: Request) -> list[Used]:
    """Ask all nodes at once who uses them, in the order of the list."""
    answered = try_all(request)
    known = {node.name: Used(node, error=error) for node, error in answered.lost}
    answers = examine(answered.reached, "gpus", "load")
    books = fleet.ask(answered.reached, [ReadBook()] * len(answered.reached), QUICK_ANSWER_SECONDS)
    for node, answer, book in zip(answered.reached, answers, books, strict=True):
        entries = book.entries if isinstance(book, Page) else ()
        cpus = node.probed.facts.cpus
        if isinstance(answer, Checkup):
            ahead = clock.ahead(node.probed.facts.clock_offset, 0.0)
            checkup = clock.of_checkup(answer, ahead)
            known[node.node.name] = Used(node.node, cpus, checkup, entries=entries)
        else:
            known[node.node.name] = Used(node.node, cpus, error=answer)
    return [known[node.name] for node in answered.source.nodes]


def users_json(used: Used) -> dict[str, Any]:
    data: dict[str, Any] = {"name": used.node.name, "reached": used.error is None}
    if used.error is not None:
        return {**data, "problem": used.error.what, "fix": used.error.fix}
    assert used.checkup is not None
    gpus, holders = used.checkup.gpus, used.checkup.holders

    def with_holders(gpu: Gpu) -> dict[str, Any]:
        here = None if holders is None else held_by(gpu, gpus or (), holders)
        known = None if here is None else [encode(holder, nones=True) for holder in here]
        return {**encode(gpu, nones=True), "holders": known}

    return {
        **data,
        "cpus": used.cpus,
        "gpus": None if gpus is None else [with_holders(gpu) for gpu in gpus],
        "load": None if used.checkup.load is None else encode(used.checkup.load, nones=True),
        "held": [encode(entry) for entry in used.entries],
        "problems": used.checkup.problems,
    }


def users_text(users: Sequence[Used], now: float, terminal: Terminal) -> str:
    rows: list[Use] = []
    lost = [(used.node.name, used.error.what, used.error.fix) for used in users if used.error]
    words = failures.reasons(lost)
    for used in users:
        if used.checkup is None:
            rows.append(Use(used.node.name, lost=True))
            continue
        rows += gpu_rows(used, used.checkup, now) or cpu_rows(used, used.checkup, now)
        words += [
            f"{used.node.name}: {part}: {reason}" for part, reason in used.checkup.problems.items()
        ]
    if len(rows) > output.MOST_ROWS:
        rows = list(used_alike(rows))
    return "\n\n".join(filter(None, [USERS.text(rows, terminal), "\n".join(words)]))


def used_alike(uses: Iterable[Use]) -> Iterator[Use]:
    """Yield the GPUs of a node together that one program uses, or nobody."""
    groups: dict[tuple[object, ...], list[Use]] = {}
    for use in uses:
        groups.setdefault((use.node, use.user, use.program), []).append(use)
    for group in groups.values():
        yield replace(
            group[0],
            gpu=folded([use.gpu for use in group]),
            since=text.span([use.since for use in group]),
            busy=text.span([use.busy for use in group]),
            memory=text.span([use.memory for use in group]),
        )


# -- GPUs -----------------------------------------------------------------------------------------


def gpu_rows(used: Used, checkup: Checkup, now: float) -> list[Use]:
    gpus, holders = checkup.gpus or (), checkup.holders or ()
    rows: list[Use] = []
    for gpu in gpus:
        busy = "-" if gpu.busy is None else "idle" if gpu.busy == 0 else f"{gpu.busy} %"
        name = f"{'?' if gpu.index is None else gpu.index}: {gpu.model}"
        here = held_by(gpu, gpus, holders)
        rows += [use_of(used, name, holder, now, busy) for holder in here]
        if not here:
            rows.append(without_users(used, gpu, Use(used.node.name, name, busy=busy), now))
    if gpus:
        rows += [use_of(used, "?", holder, now) for holder in unplaced(gpus, holders)]
    return rows


def without_users(used: Used, gpu: Gpu, row: Use, now: float) -> Use:
    """Say of a GPU on which nobody computes whether a job holds it, or whether it is free."""
    assert used.checkup is not None
    row = replace(row, memory=memory_of(gpu))
    holder = next((one for one in used.entries if f"GPU {gpu.index}" in one.names), None)
    if holder is None or gpu.problem:
        user, program = nobody(gpu, used.checkup)
        return replace(row, user=user, program=program)
    words = f"{holder.job} ({'holds it' if holder.state == RUNNING else 'is about to start'})"
    return replace(row, user=holder.user, program=words, since=since(holder.since, now))


def use_of(used: Used, gpu: str, holder: Holder, now: float, busy: str = "-") -> Use:
    return Use(
        node=used.node.name,
        gpu=gpu,
        user=holder.user or "?",
        program=program(holder.job, holder.name, holder.pid),
        since=since(holder.since, now),
        busy=busy,
        memory="-" if holder.used is None else text.size(holder.used, binary=True),
    )


def held_by(gpu: Gpu, gpus: Sequence[Gpu], holders: Sequence[Holder]) -> list[Holder]:
    """Return who computes on a GPU; on a machine with one GPU that is everybody."""
    alone = len(gpus) == 1
    return [h for h in holders if (h.gpu and h.gpu == gpu.uuid) or (alone and not h.gpu)]


def unplaced(gpus: Sequence[Gpu], holders: Sequence[Holder]) -> Iterator[Holder]:
    """Return those of whom the driver does not say which GPU they use."""
    placed = {holder.pid for gpu in gpus for holder in held_by(gpu, gpus, holders)}
    return (holder for holder in holders if holder.pid not in placed)


def nobody(gpu: Gpu, checkup: Checkup) -> tuple[Cell, str]:
    """Say that a GPU is free; or that nobody can tell, or that somebody unseen has memory of it."""
    if gpu.problem:
        return ("sick", LOST), gpu.problem
    if checkup.holders is None:
        return machine.UNKNOWN, "-"
    if machine.hides_users(gpu):
        return machine.UNKNOWN, machine.HIDDEN
    return ("free", FREE), "-"


def memory_of(gpu: Gpu) -> str:
    if gpu.memory is None:
        return "-"
    whole = text.size(gpu.memory, binary=True)
    return whole if gpu.used is None else f"{text.size(gpu.used, binary=True)} of {whole}"


# -- machines without GPUs ------------------------------------------------------------------------


def cpu_rows(used: Used, checkup: Checkup, now: float) -> list[Use]:
    """Name the users of the processors; a line says so where nobody can tell whether there are."""
    load, gpu = checkup.load, machine.UNKNOWN if checkup.gpus is None else "none"
    rows = [
        Use(
            node=used.node.name,
            gpu=gpu,
            user=user.user,
            program=program(user.job, user.name, user.pid),
            since=since(user.since, now),
            busy=f"{user.cores:.1f} of {used.cpus} cores" if user.cores >= 0.05 else "idle",
            memory=text.size(user.memory, binary=True),
        )
        for user in (load.users if load is not None else ())
    ]
    if machine.unknown_users(checkup):
        busy = machine.UNKNOWN if load is None else f"{load.unseen:.1f}"
        program_ = machine.HIDDEN if load is not None and load.unseen else "-"
        whole = f"{busy} of {used.cpus} cores"
        return [*rows, Use(used.node.name, gpu, machine.UNKNOWN, program_, busy=whole)]
    free = Use(used.node.name, gpu, ("free", FREE), busy=f"0 of {used.cpus} cores")
    return rows or [free]


def program(job: str, name: str, pid: int) -> str:
    return job or f"{name or '?'} ({pid})"


def since(moment: float | None, now: float) -> str:
    if moment is None or moment > now:
        return "-"
    return text.duration(now - moment)


# -- which launches pass over ----------------------------------------------------------------------


def cordon(node_list: Path, hosts: Sequence[str], reason: str) -> int:
    nodes = choose(read_nodes(node_list), hosts)
    machines = list(dict.fromkeys(machine_of(each.node) for each in nodes))
    for each in cordons.add(machines, reason.strip()):
        output.write_out(f"{each.machine} is cordoned ({each.words}): launches skip it")
    return EXIT_DONE


def uncordon(node_list: Path, hosts: Sequence[str]) -> int:
    """Let jobs run on these again, also on machines that are in no list any more."""
    known = cordons.read()
    machines: dict[str, None] = {}
    for host in hosts:
        machines.update(
            dict.fromkeys([host] if host in known else machines_of(node_list, host, known))
        )
    cordons.remove(list(machines))
    for name in machines:
        output.write_out(f"{name} {'is used again' if name in known else 'was not cordoned'}")
    return EXIT_DONE


def machines_of(node_list: Path, host: str, known: Iterable[str]) -> list[str]:
    """Return the machines that a name or a number means in the node list."""
    try:
        return [machine_of(each.node) for each in choose(read_nodes(node_list), (host,))]
    except UsageError as error:
        hint = nearest(host, known)
        raise UsageError(f"{host} is not cordoned{hint}", "orchestrator node list") from error


def cordoned_names() -> list[str]:
    """Return the machines that are cordoned, for completion."""
    try:
        return list(cordons.read())
    except OrchestratorError:
        return []


def date_of(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


CORDONED: Table[cordons.Cordon] = Table(
    (
        Column("MACHINE", lambda one: one.machine),
        Column("SINCE", lambda one: date_of(one.since)),
        Column("BY", lambda one: one.by),
        Column("REASON", lambda one: one.reason),
    )
)


def show_cordoned(node_list: Path | None) -> int:
    """Show the machines that are cordoned; with a node list, those of them that it names."""
    known = list(cordons.read().values())
    if node_list is not None:
        machines = {machine_of(node) for node in read_nodes(node_list)}
        known = [each for each in known if each.machine in machines]
    nothing = f"no machine {'of the list ' * (node_list is not None)}is cordoned"
    data = {"cordoned": [asdict(each) for each in known]}
    output.result(data, lambda t: CORDONED.text(known, t) if known else nothing)
    return EXIT_DONE
