"""Hold what a launch wants of its nodes: all of it, or nothing on any of them.

All nodes are asked at once. Two launches that meet in the middle both let go; then each asks one
node after the other, in an order that is the same for all, so that one of them gets everything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.common.errors import CheckFailed, OrchestratorError
from orchestrator.common.hosts import listed
from orchestrator.common.text import plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.facts import by_value, said_of
from orchestrator.head.plan import wishes
from orchestrator.head.plan.plan import count_ranks
from orchestrator.head.screen import failures
from orchestrator.head.start.claims import rules
from orchestrator.head.start.request import Request
from orchestrator.protocol.requests.claims import STARTING, Wish, who_has
from orchestrator.protocol.requests.start import Claim, Claimed, Page, ReadBook, Unclaim

log = logging.getLogger(__name__)

ANSWER_SECONDS = 15.0
PATIENCE_SECONDS = 5.0  # for a launch that has less to wait for, and is about to start or give up


class Occupied(CheckFailed):
    """Others have GPUs or slots that the job needs."""

    def __init__(self, taken: Mapping[str, str], least: int) -> None:
        lines = "".join(
            f"\n  {line}"
            for line in failures.reasons((name, words, "") for name, words in taken.items())
        )
        super().__init__(
            f"the job needs {plural(least, 'node')}, and what it wants of them is not free; nothing"
            f" was started{lines}",
            "wait for it: --queue; or take a part of each node: --gpus N; or start whoever else is"
            " there: --claim none",
        )
        self.taken = taken


def wish_of(request: Request, node: Reached) -> Wish | None:
    """Return what a launch wants of a node, if it must not start without."""
    ranks, _ = count_ranks(node.probed, request.config.launch)
    wish = wishes.of(node.probed, request.config, ranks, request.env)
    return wish if wish is not None and wish.needed else None


@dataclass(frozen=True)
class Hold:
    """Tells what is held of some nodes now, or what is in the way of that."""

    bad: Mapping[str, str] = field(default_factory=dict)  # by the node's name
    notes: tuple[str, ...] = ()  # which part of each node it is, and what nobody knows


class TooMany(Occupied):
    """The user's jobs would have more GPUs than one user may have."""

    def __init__(self, words: str) -> None:
        CheckFailed.__init__(
            self,
            f"{words}; nothing was started",
            "take fewer: --gpus N, --nnodes N; or wait until jobs of yours are over: --queue",
        )
        self.taken = {"the rules": words}


def take(request: Request, nodes: Sequence[Reached], all_nodes: Sequence[Reached]) -> Hold:
    """Hold what the launch wants of these nodes, or nothing of any of them.

    `all_nodes`: those where jobs of the same user count for the rules.
    """
    wanted = [(node, wish) for node in nodes if (wish := wish_of(request, node))]
    if not wanted:
        return Hold()
    hold = take_all(wanted)
    if not hold.bad and (words := against_the_rules(all_nodes)):
        release([node for node, _ in wanted])
        raise TooMany(words)
    return hold


def against_the_rules(nodes: Sequence[Reached]) -> str:
    """Say which rule is broken, once the launch has what it wants: two at a time both see that."""
    if rules.strictest(nodes, "gpus_per_user") is None:
        return ""
    books = fleet.ask(nodes, [ReadBook()] * len(nodes), ANSWER_SECONDS)
    pairs = zip(nodes, books, strict=True)
    return rules.too_many({n.node.name: book for n, book in pairs if isinstance(book, Page)}, 0)


def take_all(wanted: Sequence[tuple[Reached, Wish]]) -> Hold:
    answers = ask(wanted, 0.0)
    bad = problems(names_of(wanted), answers)
    log.info("claims on %s: %s", names_of(wanted), bad or "held")
    if not bad:
        return Hold(notes=tuple(notes(wanted, answers)))
    release([node for node, _ in wanted])
    if not all(fleeting(answer) for answer in answers):
        return Hold(bad)
    wanted, answers = sorted(wanted, key=lambda pair: in_order(pair[0])), []
    for pair in wanted:
        answers += ask([pair], PATIENCE_SECONDS)
        bad = problems(names_of([pair]), answers[-1:])
        if bad:
            release([node for node, _ in wanted])
            return Hold(bad)
    return Hold(notes=tuple(notes(wanted, answers)))


def notes(wanted: Sequence[tuple[Reached, Wish]], answers: Sequence[Claimed]) -> Iterator[str]:
    """Say which GPUs of which nodes a launch has, where it has not all, and what is not known."""
    names = names_of(wanted)
    parts = [answer.words if " of " in answer.words else "" for answer in answers]
    for words, where in by_value(zip(names, parts, strict=True)).items():
        if words:
            yield f"{words} on {listed(where)}"
    for why, where in by_value(zip(names, (one.unsure for one in answers), strict=True)).items():
        if why:
            yield f"who else computes on the GPUs of {listed(where)} is not known: {why}"


def in_order(node: Reached) -> tuple[str, int]:
    """Order machines, whatever they are called in somebody's list."""
    return node.facts.boot, node.facts.network


def ask(wanted: Sequence[tuple[Reached, Wish]], patience: float) -> list[Claimed]:
    requests = [Claim(wish=wish, patience=patience) for _, wish in wanted]
    nodes = [node for node, _ in wanted]
    answers = fleet.ask(nodes, requests, ANSWER_SECONDS + patience)
    if any(isinstance(answer, OrchestratorError) for answer in answers):
        release(nodes)
    return failures.all_or_table([node.node for node in nodes], answers, "; nothing was started")


def release(nodes: Sequence[Reached]) -> None:
    """Let go of what is held on these nodes; one that does not answer lets go by itself."""
    fleet.ask(nodes, [Unclaim()] * len(nodes), ANSWER_SECONDS)


def names_of(wanted: Sequence[tuple[Reached, Wish]]) -> list[str]:
    return [node.node.name for node, _ in wanted]


def problems(names: Sequence[str], answers: Sequence[Claimed]) -> dict[str, str]:
    """Return the nodes that lack something, each with the reason."""
    return {
        name: answer.lacking or who_has(answer.taken)
        for name, answer in zip(names, answers, strict=True)
        if not answer.held
    }


def fleeting(answer: Claimed) -> bool:
    """Tell whether what speaks against a start may pass in a moment."""
    return not answer.lacking and all(taken.state == STARTING for taken in answer.taken)


def foreseen(request: Request, nodes: Sequence[Reached]) -> list[str]:
    """Say of which nodes others have what the launch wants, as it is now; take nothing."""
    wanted = [(node, wish) for node in nodes if (wish := wish_of(request, node))]
    requests = [ReadBook(wish=wish, programs=True) for _, wish in wanted]
    books = fleet.ask([node for node, _ in wanted], requests, ANSWER_SECONDS)
    few: dict[str, str] = {}
    for (node, _), book in zip(wanted, books, strict=True):
        if isinstance(book, Page) and book.free < book.wants:
            few[node.node.name] = f"{book.free} of {book.wants} free"
    words = " now: a launch would be refused, or wait with --queue"
    return [line + words for line in said_of(few.items())]
