"""Shows and ends what is kept ready for the next command: warm processes, SSH connections.

The commands `orchestrator warm` and `connections`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    OrchestratorError,
    UsageError,
)
from orchestrator.common.text import Say, duration, parse_seconds, size
from orchestrator.config.launch import Where
from orchestrator.head.background.process import Answers, Background
from orchestrator.head.connect import fleet
from orchestrator.head.connect.held import control
from orchestrator.head.connect.held.control import Holding
from orchestrator.head.connect.held.transport import HeldTransport
from orchestrator.head.connect.reach import ask_once
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes import clock
from orchestrator.head.nodes.environment import chosen
from orchestrator.head.nodes.node_list import Node, choose, read_nodes
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import Cell, Column, Table, Terminal
from orchestrator.head.start.stages import Launched
from orchestrator.head.status import containers
from orchestrator.head.status.find_job import without_record
from orchestrator.protocol.message import Message, encode
from orchestrator.protocol.requests.warm import Warm, WarmEnds, WarmOff, WarmPairs

ANSWER_SECONDS = 30.0
END_SECONDS = 60.0
# Every job has these, and most of them the same.
COMMON = ("HOME", "PATH", "LANG", "LC_CTYPE", "PYTORCH_NVML_BASED_CUDA_CHECK")

Answer = WarmPairs | WarmEnds | OrchestratorError
Replies = Sequence[tuple[Node, Answer]]  # of each place


def warm(where: Where, wanted: str | None, *, off: bool, as_json: bool) -> int:
    """Show what waits on each node, or end it and prove that."""
    ssh = without_record(where)
    targets = choose(read_nodes(where.node_list), () if wanted is None else (wanted,))
    nodes = [target.node for target in targets]
    places = [*nodes, *containers.of_nodes(nodes, where, containers.may_be_warm)]

    def ask(node: Node) -> WarmPairs | WarmEnds:
        if off:
            return ask_once(ssh, node, WarmOff(), END_SECONDS)
        return clock.warm_now(ask_once(ssh, node, Warm(), ANSWER_SECONDS))

    answers = fleet.everywhere(places, ask)
    shown = news(places, answers)
    words = receipts if off else to_text
    output.result(to_data(shown), partial(words, shown), as_json=as_json)
    if off and wanted is None:  # all of it: also what waits on this machine
        control.end()
    if any(end.left for answer in answers if isinstance(answer, WarmEnds) for end in answer.ends):
        return EXIT_FAILED
    lost = any(isinstance(answer, OrchestratorError) for answer in answers)
    return EXIT_NODE if lost else EXIT_DONE


def news(places: Sequence[Node], answers: Sequence[Answer]) -> Replies:
    """Leave out a second way into a node that shows nothing new: numactl is no container."""
    known: dict[str, set[str]] = {}
    kept = []
    for place, answer in zip(places, answers, strict=True):
        seen = set(map(repr, pairs_in(answer)))
        new = place.name not in known or seen - known[place.name]
        if new or isinstance(answer, OrchestratorError):
            kept.append((place, answer))
        known.setdefault(place.name, set()).update(seen)
    return kept


def pairs_in(answer: Answer) -> list[tuple[str, Iterable[int]]]:
    """Return what tells each pair of an answer from all others."""
    if isinstance(answer, WarmPairs):
        return [(pair.key, sorted(pair.pids)) for pair in answer.pairs]
    if isinstance(answer, WarmEnds):
        return [(end.key, sorted({*end.ended, *end.left})) for end in answer.ends]
    return []


# -- what waits -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A pair of processes that waits on a node, or that none does."""

    place: str
    state: Cell
    times: str = ""
    memory: str = ""
    python: str = ""
    serves: str = ""  # what the next job must have in common with it


PAIRS: Table[Line] = Table(
    (
        Column("", lambda line: line.place),
        Column("", lambda line: line.state),
        Column("", lambda line: line.times),
        Column("", lambda line: line.memory),
        Column("", lambda line: line.python),
    )
)


def to_text(answers: Replies, terminal: Terminal) -> str:
    """Return a line for each pair, and what the next job must have in common with it."""
    lines = list(lines_of(answers))
    places: dict[str, list[str]] = {}
    for line in lines:
        if line.serves:
            places.setdefault(line.serves, []).append(line.place)
    notes = [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in places.items()]
    notes += reasons_of(answers)
    return "\n".join([PAIRS.text(lines, terminal), *map(output.printable, notes)])


def reasons_of(answers: Replies) -> list[str]:
    """Say what to type for nodes that could not be asked, where that is known."""
    errors = ((node, answer) for node, answer in answers if isinstance(answer, OrchestratorError))
    return fleet.reasons((node.place, each.what, each.fix) for node, each in errors if each.fix)


def lines_of(answers: Replies) -> Iterator[Line]:
    for node, answer in answers:
        if isinstance(answer, OrchestratorError):
            yield Line(node.place, ("unreachable", styles.FAILED), answer.what)
            continue
        pairs = answer.pairs if isinstance(answer, WarmPairs) else ()
        if not pairs:
            yield Line(node.place, "cold")
        for pair in pairs:
            since = f"for {duration(round(max(0.0, time.time() - pair.since)))}"
            left = f"{duration(round(pair.seconds_left))} left"
            shown = ", ".join(f"{n}={v}" for n, v in pair.variables.items() if n not in COMMON)
            parts = [f"for jobs with {shown}"] if shown else []
            if pair.skipped:
                parts.append(f"{', '.join(sorted({*pair.skipped}))} are left to the ranks")
            yield Line(
                node.place,
                ("warm", styles.DONE) if pair.ready else ("importing", styles.WARNING),
                f"{since}, {left}",
                size(pair.memory, binary=True),
                pair.python,
                "; ".join(parts),
            )


def receipts(answers: Replies, _: Terminal) -> str:
    """Say for each node what was ended, and whether anything is left."""
    lines = []
    for node, answer in answers:
        if isinstance(answer, OrchestratorError):
            lines += fleet.reasons([(node.place, f"unreachable: {answer.what}", answer.fix)])
            continue
        ends = answer.ends if isinstance(answer, WarmEnds) else ()
        left = ", ".join(str(pid) for end in ends for pid in end.left)
        ended = sum(len(end.ended) for end in ends)
        if left:
            lines.append(f"{node.place}: processes {left} do not end (stuck in the kernel?)")
        elif ended:
            lines.append(f"{node.place}: ended {ended} processes that waited; none is left")
        else:
            lines.append(f"{node.place}: nothing was warm")
    return "\n".join(lines)


def to_data(answers: Replies) -> dict[str, object]:
    rows: list[dict[str, object]] = []
    for node, answer in answers:
        wrap = chosen(node.wrap)
        place = {"node": node.name, "wrap": wrap} if wrap else {"node": node.name}
        if isinstance(answer, OrchestratorError):
            rows.append({**place, "state": "unreachable", "why": answer.what})
            continue
        inner: Sequence[Message] = answer.pairs if isinstance(answer, WarmPairs) else answer.ends
        key = "warm" if isinstance(answer, WarmPairs) else "ended"
        rows.append({**place, key: [encode(item, nones=True) for item in inner]})
    return {"nodes": rows}


# `orchestrator connections`: hold SSH connections open between commands, show and close them.

IDLE_SECONDS = 600.0  # without use after which they are closed
START_SECONDS = 20.0
POLL_SECONDS = 0.05
NODE_PATIENCE_SECONDS = 2.0  # with a node whose connection may be dead


# -- the command ----------------------------------------------------------------------------------


def connections(where: Where, *, idle: str | None, close: bool, as_json: bool) -> int:
    """Show the connections that are held, after opening or closing them."""
    if idle is not None and close:
        raise UsageError("--open cannot be combined with --close", "give one of them")
    if close:
        held = control.end()
    elif idle is not None:
        held = hold_all(where, parse_seconds("--open", idle))
    else:
        held = control.holding()
    data = held_data(held, closed=close)
    output.result(data, partial(held_text, held, close), as_json=as_json)
    lost = held is not None and any(one.state == "lost" for one in held.connections)
    return EXIT_NODE if lost and not close else EXIT_DONE


def hold_all(where: Where, idle: float) -> Holding | None:
    """Hold connections to all nodes of the list, and wait until each is there or has failed.

    Other nodes whose connections are held, and perhaps lost, are none of its business.
    """
    transport = without_record(where)
    held = keep(transport, read_nodes(where.node_list), idle)
    names = {one.node for one in held.connections} if held else set()
    deadline = time.monotonic() + transport.timeout + START_SECONDS
    while held is not None and time.monotonic() < deadline:
        if all(one.state != "connecting" for one in held.connections):
            break
        time.sleep(POLL_SECONDS)
        held = control.holding()
        if held is not None:
            own = tuple(one for one in held.connections if one.node in names)
            held = replace(held, connections=own)
    return held


def held_text(held: Holding | None, closed: bool, terminal: Terminal) -> str:
    if held is None or not held.connections:
        return "orchestrator: no connections are held open"
    rows: list[list[Cell]] = [["NODE", "CONNECTION", "COMMANDS NOW", ""]]
    for one in held.connections:
        state: Cell = "closed" if closed else (one.state, styles.STATES.get(one.state, ""))
        rows.append([one.node, state, str(one.sessions or "-"), one.why])
    ends = f"process {held.pid} " + (
        "is gone" if closed else f"ends after {duration(held.idle)} without use"
    )
    return f"{output.table(rows, terminal, headed=True)}\n{ends}"


def held_data(held: Holding | None, *, closed: bool) -> dict[str, Any]:
    if held is None:
        return {"pid": None, "connections": []}
    listed = [asdict(one) | ({"state": "closed"} if closed else {}) for one in held.connections]
    return {"pid": held.pid, "idle": held.idle, "connections": listed}


# -- the process ----------------------------------------------------------------------------------


def held_connections(answers: Answers, idle: float, patience: float) -> None:
    """Become the process that holds connections."""
    from orchestrator.head.connect.held.process import hold_connections

    def ready() -> None:
        answers.send(pid=os.getpid())
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        answers.out.close()
        os.chdir("/")  # no directory of the user's is held

    try:
        hold_connections(idle, ready, patience)
    except BlockingIOError:  # another command was faster, and starts one
        answers.send(pid=None)


def keep_after(launched: Launched, say: Say) -> threading.Thread:
    """Hold the connections of a job with --warm open for the commands after it, meanwhile."""

    def hold() -> None:
        nodes = [node.node for node in launched.nodes.reached]
        try:
            keep(launched.nodes.transport, nodes, idle)
        except (OrchestratorError, OSError) as error:
            say(f"its SSH connections are not held open: {error}")

    idle = parse_seconds("--warm", launched.running.record.launch.warm or "")
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    return thread


def keep(
    transport: Transport,
    nodes: Sequence[Login],
    idle: float = IDLE_SECONDS,
    patience: float = NODE_PATIENCE_SECONDS,
) -> Holding | None:
    """Hold connections to these nodes from now on; None where nodes are not reached by SSH.

    The process that does so is started where there is none yet, and replaced where it runs another
    version of this program. It connects by itself, while the caller goes on.
    """
    if not isinstance(transport, HeldTransport):
        return None
    held = control.hold(transport, nodes, idle)
    if held is None:
        control.retire()
        Background(held_connections, idle=idle, patience=patience).answer()
        deadline = time.monotonic() + START_SECONDS
        while (held := control.hold(transport, nodes, idle)) is None:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)  # another command has started it, and it is not ready yet
    if held is None:
        raise OrchestratorError("the process that holds SSH connections does not answer")
    return held
