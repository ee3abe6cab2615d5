"""Shows what waits on the nodes for the next job, and ends it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from orchestrator.common.errors import OrchestratorError
from orchestrator.common.text import duration, size
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import ask_once
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes import clock
from orchestrator.head.nodes.environment import chosen
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.screen import output
from orchestrator.head.screen.output import Cell
from orchestrator.protocol.message import Message, encode
from orchestrator.protocol.requests.warm import Warm, WarmEnds, WarmOff, WarmPairs

ANSWER_SECONDS = 30.0
END_SECONDS = 60.0
# Every job has these, and most of them the same.
COMMON = ("HOME", "PATH", "LANG", "LC_CTYPE", "PYTORCH_NVML_BASED_CUDA_CHECK")

Answer = WarmPairs | WarmEnds | OrchestratorError
Listed = Sequence[WarmPairs | OrchestratorError]
Ended = Sequence[WarmEnds | OrchestratorError]
News = Sequence[tuple[Node, Any]]  # each place with its answer, of one kind


def ask(ssh: Transport, nodes: Sequence[Node]) -> Listed:
    """Ask every node what waits there."""
    return fleet.everywhere(
        nodes, lambda node: clock.warm_now(ask_once(ssh, node, Warm(), ANSWER_SECONDS))
    )


def end(ssh: Transport, nodes: Sequence[Node]) -> Ended:
    """End what waits on these nodes."""
    return fleet.everywhere(nodes, lambda node: ask_once(ssh, node, WarmOff(), END_SECONDS))


def news(places: Sequence[Node], answers: Listed | Ended) -> News:
    """Leave out a second way into a node that shows nothing new: numactl is no container."""
    told: dict[str, set[str]] = {}
    kept = []
    for place, answer in zip(places, answers, strict=True):
        seen = set(map(repr, pairs_in(answer)))
        if (
            place.name not in told
            or seen - told[place.name]
            or isinstance(answer, OrchestratorError)
        ):
            kept.append((place, answer))
        told.setdefault(place.name, set()).update(seen)
    return kept


def pairs_in(answer: Answer) -> list[tuple[str, Iterable[int]]]:
    """Return what tells each pair of an answer from all others."""
    if isinstance(answer, WarmPairs):
        return [(pair.key, sorted(pair.pids)) for pair in answer.pairs]
    if isinstance(answer, WarmEnds):
        return [(end.key, sorted({*end.ended, *end.left})) for end in answer.ends]
    return []


def to_text(told: News) -> str:
    """Return a line for each pair, and what the next job must have in common with it."""
    rows: list[list[Cell]] = []
    variables: dict[str, list[str]] = {}
    for node, answer in told:
        if isinstance(answer, OrchestratorError):
            rows.append([node.place, ("unreachable", "red"), answer.what, "", ""])
            continue
        if not answer.pairs:
            rows.append([node.place, "cold", "", "", ""])
        for pair in answer.pairs:
            state: Cell = ("warm", "green") if pair.ready else ("importing", "yellow")
            since = f"for {duration(round(max(0.0, time.time() - pair.since)))}"
            left = f"{duration(round(pair.seconds_left))} left"
            memory = size(pair.memory, binary=True)
            rows.append([node.place, state, f"{since}, {left}", memory, pair.python])
            given = ", ".join(f"{n}={v}" for n, v in pair.variables.items() if n not in COMMON)
            parts = [f"for jobs with {given}"] if given else []
            if pair.skipped:
                parts.append(f"{', '.join(sorted({*pair.skipped}))} are left to the ranks")
            variables.setdefault("; ".join(parts), []).append(node.place)
    lines = [output.table(rows, output.look())]
    for text, names in variables.items():
        if text:
            lines.append(output.printable(f"{', '.join(dict.fromkeys(names))}: {text}"))
    return "\n".join(lines)


def receipts(told: News) -> str:
    """Say for each node what was ended, and whether anything is left."""
    lines = []
    for node, answer in told:
        if isinstance(answer, OrchestratorError):
            lines.append(f"{node.place}: unreachable: {answer.what}")
            continue
        left = [str(pid) for end in answer.ends for pid in end.left]
        ended = sum(len(end.ended) for end in answer.ends)
        if left:
            lines.append(
                f"{node.place}: processes {', '.join(left)} do not end (stuck in the kernel?)"
            )
        elif ended:
            lines.append(f"{node.place}: ended {ended} processes that waited; none is left")
        else:
            lines.append(f"{node.place}: nothing was warm")
    return "\n".join(lines)


def to_json(told: News) -> str:
    rows: list[dict[str, object]] = []
    for node, answer in told:
        wrap = chosen(node.wrap)
        place = {"node": node.name, "wrap": wrap} if wrap else {"node": node.name}
        if isinstance(answer, OrchestratorError):
            rows.append({**place, "state": "unreachable", "why": answer.what})
            continue
        inner: Sequence[Message] = answer.pairs if isinstance(answer, WarmPairs) else answer.ends
        key = "warm" if isinstance(answer, WarmPairs) else "ended"
        rows.append({**place, key: [encode(item, nones=True) for item in inner]})
    return json.dumps({"nodes": rows}, indent=1)


def all_reached(answers: Listed | Ended) -> bool:
    return not any(isinstance(answer, OrchestratorError) for answer in answers)


def all_gone(answers: Ended) -> bool:
    ends = [answer for answer in answers if not isinstance(answer, OrchestratorError)]
    return not any(end.left for answer in ends for end in answer.ends)
