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
    StandbyEnds,
    StandbyStates,
    Warm,
    WarmOff,
)

ANSWER_SECONDS = 60.0

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


def warm(where: Where, wanted: str | None, *, off: bool) -> int:
    """Show what waits on each node, or end it and prove that."""
    ssh = without_record(where)
    targets = choose(read_nodes(where.node_list), () if wanted is None else (wanted,))
    nodes = [target.node for target in targets]
    places = [*nodes, *containers.of_nodes(nodes, where, containers.may_be_warm)]

    def ask(node: Node) -> StandbyStates | StandbyEnds:
        if off:
            return ask_once(ssh, node, WarmOff(), ANSWER_SECONDS)
        return clock.warm_now(ask_once(ssh, node, Warm(), ANSWER_SECONDS))

    shown = news(places, fleet.everywhere(places, ask))
    output.result(to_data(shown), partial(to_text, shown))
    if any(isinstance(answer, StandbyEnds) and answer.left for _, answer in shown):
        return EXIT_FAILED
    lost = any(isinstance(answer, OrchestratorError) for _, answer in shown)
    return EXIT_NODE if lost else EXIT_DONE


def news(places: Sequence[Node], answers: Sequence[Answer]) -> Replies:
    """Leave out a second way into a node that shows nothing new: numactl is no container."""
    known: dict[str, set[int]] = {}
    kept = []
    for place, answer in zip(places, answers, strict=True):
        pids = pids_in(answer)
        new = place.name not in known or pids - known[place.name]
        if new or isinstance(answer, OrchestratorError):
            kept.append((place, answer))
        known.setdefault(place.name, set()).update(pids)
    return kept


def pids_in(answer: Answer) -> set[int]:
    if isinstance(answer, StandbyStates):
        return {each.pid for each in answer.standbys}
    return {*answer.ended, *answer.left} if isinstance(answer, StandbyEnds) else set()


def to_text(answers: Replies, terminal: Terminal) -> str:
    """Return a line for each process that waits or was ended, and for each node without one."""
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
    elif isinstance(answer, StandbyEnds):
        yield node.place, receipt(answer), "", "", ""
    elif not answer.standbys:
        yield node.place, "cold", "", "", ""
    for each in answer.standbys if isinstance(answer, StandbyStates) else ():
        state = ("warm", styles.DONE) if each.ready else ("importing", styles.WARNING)
        since = duration(round(max(0.0, time.time() - each.since)))
        times = f"for {since}, {duration(round(each.seconds_left))} left"
        yield node.place, state, times, size(each.memory, binary=True), each.python


def receipt(answer: StandbyEnds) -> Cell:
    if answer.left:
        left = ", ".join(map(str, answer.left))
        return f"processes {left} do not end (stuck in the kernel?)", styles.FAILED
    ended = ", ".join(map(str, answer.ended))
    return f"ended {ended}; none is left" if ended else "nothing was warm"


def to_data(answers: Replies) -> dict[str, object]:
    rows: list[dict[str, object]] = []
    for node, answer in answers:
        wrap = chosen(node.wrap)
        place = {"node": node.name, "wrap": wrap} if wrap else {"node": node.name}
        if isinstance(answer, OrchestratorError):
            rows.append({**place, "state": "unreachable", "why": answer.what})
            continue
        data = encode(answer, nones=True)
        rows.append({**place, **({"warm": data["standbys"]} if "standbys" in data else data)})
    return {"nodes": rows}
