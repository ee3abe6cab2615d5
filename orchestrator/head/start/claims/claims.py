"""Hold what a job needs of its nodes: all of it, or nothing on any of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.common.errors import CheckFailed, NodeError
from orchestrator.common.hosts import listed
from orchestrator.common.text import plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.facts import by_value
from orchestrator.head.plan import wishes
from orchestrator.head.plan.plan import count_ranks
from orchestrator.head.screen import failures
from orchestrator.head.start.request import Request
from orchestrator.protocol.requests.claims import STARTING, Wish, who_has
from orchestrator.protocol.requests.start import Claim, Claimed, Unclaim
from orchestrator.protocol.timing import QUICK_ANSWER_SECONDS

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0  # for a launch that is about to start, or to give up


class Occupied(CheckFailed):
    """Others have GPUs or slots that the job needs."""

    def __init__(self, missing: Mapping[str, str], least: int) -> None:
        lines = "".join(
            f"\n  {line}"
            for line in failures.reasons((name, words, "") for name, words in missing.items())
        )
        super().__init__(
            f"the job needs {plural(least, 'node')}, and what it wants of them is not free; nothing"
            f" was started{lines}",
            "wait for it: --queue; or take a part of each node: --gpus N; or start whoever else is"
            " there: --claim none",
        )
        self.missing = missing


@dataclass(frozen=True)
class NodeClaim:
    """The GPUs or slots that a job needs of one node."""

    name: str
    channel: NodeChannel
    wish: Wish | None = None
    part: tuple[str, int] | None = None  # of a job that is started again: the node has its wish


@dataclass(frozen=True)
class Hold:
    """The GPUs that are held on some nodes, or why none are."""

    missing: Mapping[str, str] = field(default_factory=dict)  # by the node's name
    notes: tuple[str, ...] = ()  # which part of each node it is, and what is not known


def take(request: Request, nodes: Sequence[Reached]) -> Hold:
    """Hold what a launch needs of these nodes, or nothing of any of them."""
    return hold(claims_of(request, nodes))


def hold(wanted: Sequence[NodeClaim]) -> Hold:
    """Hold what is wanted of all these nodes, or nothing; return what is missing per node.

    All nodes are asked at once. Launches that meet there all let go. Then each asks one node after
    the other, in an order of machines that is the same for all, so that one gets everything.
    """
    answers = ask(wanted, 0.0)
    if not all(one.held for one in answers) and all(map(is_passing, answers)):
        release(wanted)
        order = sorted(range(len(wanted)), key=lambda at: answers[at].machine)
        wanted, answers = [wanted[at] for at in order], []
        for one in wanted:
            answers += ask([one], PATIENCE_SECONDS)
            if not answers[-1].held:
                break
    missing = {
        one.name: answer.lacking or who_has(answer.taken)
        for one, answer in zip(wanted, answers, strict=False)  # the last may not have been asked
        if not answer.held
    }
    log.info("claims on %s: %s", [one.name for one in wanted], missing or "held")
    if missing:
        release(wanted)
        return Hold(missing)
    return Hold(notes=tuple(notes([one.name for one in wanted], answers)))


def ask(wanted: Sequence[NodeClaim], patience: float) -> list[Claimed]:
    """Ask nodes for what is wanted of them; if one does not answer, let go of the others."""
    claims = [Claim(wish=one.wish, part=one.part, patience=patience) for one in wanted]
    channels = [one.channel for one in wanted]
    answers = fleet.ask_channels(channels, claims, QUICK_ANSWER_SECONDS + patience)
    if silent := failures.failures(wanted, answers):
        release(wanted)
        table = failures.failure_table(silent, len(answers), "; nothing was started")
        raise NodeError(table, names=[one.name for one, _ in silent])
    return [answer for answer in answers if isinstance(answer, Claimed)]


def release(wanted: Sequence[NodeClaim]) -> None:
    """Let go of what is held on these nodes; one that does not answer lets go by itself."""
    requests = [Unclaim()] * len(wanted)
    fleet.ask_channels([one.channel for one in wanted], requests, QUICK_ANSWER_SECONDS)


def is_passing(answer: Claimed) -> bool:
    """Return True if all that is in the way may pass in a moment."""
    return not answer.lacking and all(taken.state == STARTING for taken in answer.taken)


def notes(names: Sequence[str], answers: Sequence[Claimed]) -> Iterator[str]:
    """Say which GPUs a job has of which nodes, where it has not all, and what is not known."""
    parts = [answer.words if " of " in answer.words else "" for answer in answers]
    for words, where in by_value(zip(names, parts, strict=True)).items():
        if words:
            yield f"{words} on {listed(where)}"
    for why, where in by_value(zip(names, (one.unsure for one in answers), strict=True)).items():
        if why:
            yield f"who else computes on the GPUs of {listed(where)} is not known: {why}"


def claims_of(request: Request, nodes: Sequence[Reached]) -> list[NodeClaim]:
    """Return what a launch must hold of these nodes before it starts."""
    wanted = [NodeClaim(n.node.name, n.channel, wish_of(request, n)) for n in nodes]
    return [one for one in wanted if one.wish is not None and one.wish.needed]


def wish_of(request: Request, node: Reached) -> Wish | None:
    """Return what a launch wants of a node; None with --claim none."""
    ranks, _ = count_ranks(node.probed, request.config.launch)
    return wishes.of(node.probed, request.config, ranks, request.env)
