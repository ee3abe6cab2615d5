"""Shows and ends the processes that wait on the nodes: `orchestrator warm`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from orchestrator.common.errors import EXIT_DONE, EXIT_FAILED, EXIT_NODE, OrchestratorError
from orchestrator.common.text import duration, size
from orchestrator.config.launch import Where
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import ask_once
from orchestrator.head.nodes import clock
from orchestrator.head.nodes.environment import chosen
from orchestrator.head.nodes.node_list import Node, choose, read_nodes
from orchestrator.head.screen import failures, output, styles
from orchestrator.head.screen.output import Cell, Column, Table, Terminal
from orchestrator.head.status import containers
from orchestrator.head.status.find_job import without_record
from orchestrator.protocol.message import encode
from orchestrator.protocol.requests.warm import (
    StandbyEnd,
    StandbyEnds,
    StandbyState,
    StandbyStates,
    Warm,
    WarmOff,
)

ANSWER_SECONDS = 30.0
END_SECONDS = 60.0

Answer = StandbyStates | StandbyEnds | OrchestratorError
Replies = Sequence[tuple[Node, Answer]]  # of each place
Row = tuple[str, Cell, str, str, str]

TABLE: Table[Row] = Table(
    (
        Column("", lambda row: row[0]),
        Column("", lambda row: row[1]),
        Column("", lambda row: row[2]),
        Column("", lambda row: row[3]),
        Column("", lambda row: row[4]),
    )
)


def warm(where: Where, wanted: str | None, *, off: bool, as_json: bool) -> int:
    """Show what waits on each node, or end it and prove that."""
    ssh = without_record(where)
    targets = choose(read_nodes(where.node_list), () if wanted is None else (wanted,))
    nodes = [target.node for target in targets]
    places = [*nodes, *containers.of_nodes(nodes, where, containers.may_be_warm)]

    def ask(node: Node) -> StandbyStates | StandbyEnds:
        if off:
            return ask_once(ssh, node, WarmOff(), END_SECONDS)
        return clock.warm_now(ask_once(ssh, node, Warm(), ANSWER_SECONDS))

    shown = news(places, fleet.everywhere(places, ask))
    words = receipts if off else to_text
    output.result(to_data(shown), partial(words, shown), as_json=as_json)
    ends = [end for _, answer in shown if isinstance(answer, StandbyEnds) for end in answer.ends]
    if not all(end.gone for end in ends):
        return EXIT_FAILED
    lost = any(isinstance(answer, OrchestratorError) for _, answer in shown)
    return EXIT_NODE if lost else EXIT_DONE


def news(places: Sequence[Node], answers: Sequence[Answer]) -> Replies:
    """Leave out a second way into a node that shows nothing new: numactl is no container."""
    known: dict[str, set[int]] = {}
    kept = []
    for place, answer in zip(places, answers, strict=True):
        pids = {one.pid for one in inside(answer)}
        new = place.name not in known or pids - known[place.name]
        if new or isinstance(answer, OrchestratorError):
            kept.append((place, answer))
        known.setdefault(place.name, set()).update(pids)
    return kept


def inside(answer: Answer) -> Sequence[StandbyState | StandbyEnd]:
    if isinstance(answer, OrchestratorError):
        return ()
    return answer.standbys if isinstance(answer, StandbyStates) else answer.ends


def to_text(answers: Replies, terminal: Terminal) -> str:
    """Return a line for each process that waits, and for each node without one."""
    reasons = failures.reasons(
        (node.place, answer.what, answer.fix)
        for node, answer in answers
        if isinstance(answer, OrchestratorError) and answer.fix
    )
    rows = [row for node, answer in answers for row in rows_of(node, answer)]
    return "\n".join([TABLE.text(rows, terminal), *map(output.printable, reasons)])


def rows_of(node: Node, answer: Answer) -> Iterator[Row]:
    if isinstance(answer, OrchestratorError):
        yield node.place, ("unreachable", styles.FAILED), answer.what, "", ""
        return
    waiting = answer.standbys if isinstance(answer, StandbyStates) else ()
    if not waiting:
        yield node.place, "cold", "", "", ""
    for each in waiting:
        state = ("warm", styles.DONE) if each.ready else ("importing", styles.WARNING)
        since = duration(round(max(0.0, time.time() - each.since)))
        times = f"for {since}, {duration(round(each.seconds_left))} left"
        yield node.place, state, times, size(each.memory, binary=True), each.python


def receipts(answers: Replies, _: Terminal) -> str:
    """Say for each node what was ended, and whether anything is left."""
    lines = []
    for node, answer in answers:
        if isinstance(answer, OrchestratorError):
            lines += failures.reasons([(node.place, f"unreachable: {answer.what}", answer.fix)])
            continue
        ends = answer.ends if isinstance(answer, StandbyEnds) else ()
        left = ", ".join(str(end.pid) for end in ends if not end.gone)
        if left:
            lines.append(f"{node.place}: processes {left} do not end (stuck in the kernel?)")
        elif ends:
            lines.append(f"{node.place}: ended {len(ends)} processes that waited; none is left")
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
        key = "warm" if isinstance(answer, StandbyStates) else "ended"
        rows.append({**place, key: [encode(item, nones=True) for item in inside(answer)]})
    return {"nodes": rows}
