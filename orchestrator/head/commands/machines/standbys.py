"""`orchestrator nodes --warm`: list the processes that wait for a job on the nodes, or end them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from orchestrator.common.errors import EXIT_DONE, EXIT_FAILED, EXIT_NODE, OrchestratorError
from orchestrator.common.text import duration, size
from orchestrator.config.launch import Where
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import ask_once
from orchestrator.head.nodes.environment import chosen
from orchestrator.head.nodes.node_list import Node, read_nodes
from orchestrator.head.screen import failures, output
from orchestrator.head.screen.output import Terminal
from orchestrator.head.status import containers
from orchestrator.head.status.find_job import without_record
from orchestrator.protocol.message import encode
from orchestrator.protocol.requests.warm import StandbyEnds, StandbyStates, Warm, WarmOff

ANSWER_SECONDS = 60.0
COLUMNS = 4  # beside the node's name

Answer = StandbyStates | StandbyEnds | OrchestratorError
Replies = Sequence[tuple[Node, Answer]]


def warm(where: Where, *, off: bool) -> int:
    """Show what waits on each node and in its containers, or end it and prove that."""
    ssh = without_record(where)
    nodes = read_nodes(where.node_list)
    places = [*nodes, *containers.of_nodes(nodes, where, containers.may_be_warm)]

    def ask(node: Node) -> StandbyStates | StandbyEnds:
        if off:
            return ask_once(ssh, node, WarmOff(), ANSWER_SECONDS)
        return ask_once(ssh, node, Warm(), ANSWER_SECONDS)

    answers: Replies = list(zip(places, fleet.everywhere(places, ask), strict=True))
    output.result(to_data(answers), partial(to_text, answers))
    if any(isinstance(answer, StandbyEnds) and answer.left for _, answer in answers):
        return EXIT_FAILED
    lost = any(isinstance(answer, OrchestratorError) for _, answer in answers)
    return EXIT_NODE if lost else EXIT_DONE


def to_text(answers: Replies, terminal: Terminal) -> str:
    """Return a line for each process that waits or was ended, and for each node without one."""
    errors = [(node, answer) for node, answer in answers if isinstance(answer, OrchestratorError)]
    reasons = failures.reasons((node.place, error.what, error.fix) for node, error in errors)
    rows = [
        [node.place, *words, *[""] * (COLUMNS - len(words))]
        for node, answer in answers
        for words in words_of(answer)
    ]
    return "\n".join([output.table(rows, terminal), *map(output.printable, reasons)])


def words_of(answer: Answer) -> Iterator[list[str]]:
    if isinstance(answer, StandbyEnds):
        ended = ", ".join(map(str, answer.ended))
        left = ", ".join(map(str, answer.left))
        yield [f"ended {ended}" if ended else "nothing was warm"]
        yield from [[f"processes {left} do not end (stuck in the kernel?)"]] * bool(left)
    elif isinstance(answer, StandbyStates):
        for each in answer.standbys:
            left = f"{duration(round(each.seconds_left))} left"
            state = "warm" if each.ready else "importing"
            yield [state, left, size(each.memory, binary=True), each.python]
        if not answer.standbys:
            yield ["cold"]


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
