"""`orchestrator who`: show who uses each GPU of the node list, or each node that has none."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.common import text
from orchestrator.common.errors import EXIT_DONE, EXIT_NODE, OrchestratorError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.commands.machines.nodes import examine
from orchestrator.head.nodes import clock
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.screen import output
from orchestrator.head.screen.output import Cell, Terminal
from orchestrator.head.screen.table import Column, Table
from orchestrator.head.start.nodes import try_all
from orchestrator.head.start.request import Request, resolve
from orchestrator.protocol.facts import Checkup, Gpu, Holder
from orchestrator.protocol.message import encode

LOST, FREE = "bold red", "green"
SOME_MEMORY = 0.05  # of a GPU: used by nobody whom the driver names, it is worth a line


@dataclass(frozen=True)
class Used:
    """Who uses one machine: what it answered, or why it could not be asked."""

    node: Node
    cpus: int = 0
    checkup: Checkup | None = None
    error: OrchestratorError | None = None


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
        Column("NODE", lambda use: use.node, absent=lambda use: (use.node, LOST)),
        Column("GPU", lambda use: use.gpu, absent=lambda _: ("unreachable", LOST)),
        Column("USER", lambda use: use.user),
        Column("JOB OR PROGRAM", lambda use: use.program),
        Column("SINCE", lambda use: use.since),
        Column("USE", lambda use: use.busy),
        Column("MEMORY", lambda use: use.memory),
    ),
    is_absent=lambda use: use.lost,
)


def who(arguments: LaunchArguments, *, as_json: bool, color: bool | None) -> int:
    users = find_users(resolve(arguments))
    if as_json:
        output.tell(json.dumps({"nodes": [to_json(used) for used in users]}, indent=1))
    else:
        output.tell(to_text(users, time.time(), output.terminal(color)))
    return EXIT_DONE if all(used.error is None for used in users) else EXIT_NODE


def find_users(request: Request) -> list[Used]:
    """Ask all nodes at once who uses them, in the order of the list."""
    answered = try_all(request)
    known = {node.name: Used(node, error=error) for node, error in answered.lost}
    answers = examine(answered.reached, "gpus", "load")
    for node, answer in zip(answered.reached, answers, strict=True):
        cpus = node.probed.facts.cpus
        if isinstance(answer, Checkup):
            ahead = clock.ahead(node.probed.facts.clock_offset, 0.0)
            known[node.node.name] = Used(node.node, cpus, clock.of_checkup(answer, ahead))
        else:
            known[node.node.name] = Used(node.node, cpus, error=answer)
    return [known[node.name] for node in answered.source.nodes]


def to_json(used: Used) -> dict[str, Any]:
    data: dict[str, Any] = {"name": used.node.name, "reached": used.error is None}
    if used.error is not None:
        return {**data, "problem": used.error.what, "fix": used.error.fix}
    assert used.checkup is not None
    gpus = used.checkup.gpus or ()
    holders = used.checkup.holders or ()
    return {
        **data,
        "cpus": used.cpus,
        "gpus": [
            {
                **encode(gpu, nones=True),
                "holders": [encode(each, nones=True) for each in held_by(gpu, gpus, holders)],
            }
            for gpu in gpus
        ],
        "load": None if used.checkup.load is None else encode(used.checkup.load, nones=True),
        "problems": used.checkup.problems,
    }


def to_text(users: Sequence[Used], now: float, terminal: Terminal) -> str:
    rows: list[Use] = []
    words: list[str] = []
    for used in users:
        if used.checkup is None:
            rows.append(Use(used.node.name, lost=True))
            words.append(f"{used.node.name}: {used.error}")
            continue
        rows += gpu_rows(used, used.checkup, now) or cpu_rows(used, used.checkup, now)
        words += [f"{used.node.name}: {part}: {why}" for part, why in used.checkup.problems.items()]
    return "\n\n".join(filter(None, [USERS.text(rows, terminal), "\n".join(words)]))


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
            user, program = nobody(gpu)
            rows.append(Use(used.node.name, name, user, program, busy=busy, memory=memory_of(gpu)))
    if gpus:
        rows += [use_of(used, "?", holder, now) for holder in unplaced(gpus, holders)]
    return rows


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


def nobody(gpu: Gpu) -> tuple[Cell, str]:
    """Say that a GPU is free, or that somebody whom we cannot see has memory of it."""
    if gpu.problem:
        return ("sick", LOST), gpu.problem
    if gpu.used and gpu.memory and gpu.used > SOME_MEMORY * gpu.memory:
        return "?", "in another container, or hidden by the driver"
    return ("free", FREE), "-"


def memory_of(gpu: Gpu) -> str:
    if gpu.memory is None:
        return "-"
    whole = text.size(gpu.memory, binary=True)
    return whole if gpu.used is None else f"{text.size(gpu.used, binary=True)} of {whole}"


# -- machines without GPUs ------------------------------------------------------------------------


def cpu_rows(used: Used, checkup: Checkup, now: float) -> list[Use]:
    users = checkup.load.users if checkup.load is not None else ()
    if not users:
        return [Use(used.node.name, "none", ("free", FREE), busy=f"0 of {used.cpus} cores")]
    return [
        Use(
            node=used.node.name,
            gpu="none",
            user=user.user,
            program=program(user.job, user.name, user.pid),
            since=since(user.since, now),
            busy=f"{user.cores:.1f} of {used.cpus} cores" if user.cores >= 0.05 else "idle",
            memory=text.size(user.memory, binary=True),
        )
        for user in users
    ]


def program(job: str, name: str, pid: int) -> str:
    return job or f"{name or '?'} ({pid})"


def since(moment: float | None, now: float) -> str:
    if moment is None or moment > now:
        return "-"
    return text.duration(now - moment)
