"""Shows and ends the warm processes of the nodes: `orchestrator warm`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    OrchestratorError,
)
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
from orchestrator.protocol.message import Message, encode
from orchestrator.protocol.requests.warm import Warm, WarmEnds, WarmOff, WarmPairs

ANSWER_SECONDS = 30.0
END_SECONDS = 60.0
# Every job has these, and most of them the same.
COMMON = ("HOME", "PATH", "LANG", "LC_CTYPE", "PYTORCH_NVML_BASED_CUDA_CHECK")

Answer = WarmPairs | WarmEnds | OrchestratorError
Replies = Sequence[tuple[Node, Answer]]  # of each place


def warm(where: Where, wanted: str | None, *, off: bool) -> int:
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
    output.result(to_data(shown), partial(words, shown))
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
    return failures.reasons((node.place, each.what, each.fix) for node, each in errors if each.fix)


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
            lines += failures.reasons([(node.place, f"unreachable: {answer.what}", answer.fix)])
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
