"""Notices that nodes cannot reach the port where the ranks meet, or later each other."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from orchestrator.common.text import plural
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.verdict import Failure
from orchestrator.protocol.requests.machine import Dial, Dialed, Listen, Listening
from orchestrator.records.experiment import NodeRecord

FIRST_DIAL_SECONDS = 6.0  # by then the ranks of most jobs have begun
NEXT_DIAL_SECONDS = 4.0
DIAL_SECONDS = 3.0
ANSWER_SECONDS = 10.0  # nodes that have not answered by then are left out
DIALS_WITHIN_SECONDS = 30.0  # both dials are over by then
REFUSED = "refused"
OPEN_ALL = (
    "open all TCP ports between the nodes, as collectives use any of them; `orchestrator doctor`"
    " shows what is blocked, with the command for the firewall that runs there"
)


class StartMonitor:
    """Lets every node call the master's port, until a rank begins or the same calls fail twice.

    torchrun starts no rank before all nodes have met at that port, and says nothing meanwhile.
    While the master itself is refused there, its torchrun is only slow: it still imports torch.
    """

    def __init__(self, master: str) -> None:
        self.master = master
        self.due_at = time.monotonic() + FIRST_DIAL_SECONDS
        self.asked_at = 0.0
        self.over = False
        self.answers: dict[int, str] = {}  # node -> why it cannot reach the port, or nothing
        self.failed_before: frozenset[int] = frozenset()

    def check(self, followers: Sequence[NodeFollower], *, begun: bool) -> Failure | None:
        """Return what is wrong, once it is known. `begun`: a rank was heard of."""
        nodes = {follower.node.index: follower for follower in followers}
        self.over = self.over or begun or not self.master or len(nodes) < 2 or 0 not in nodes
        if self.over:
            return None
        now = time.monotonic()
        if self.asked_at:
            if self.answers.keys() >= nodes.keys() or now - self.asked_at > ANSWER_SECONDS:
                return self._settle(nodes, now)
        elif now >= self.due_at:
            self.asked_at, self.answers = now, {}
            address, _, port = self.master.rpartition(":")
            for follower in followers:
                follower.ask(Dial(places=((address, int(port), ""),), seconds=DIAL_SECONDS))
        return None

    def answer(self, node: int, dialed: Dialed) -> None:
        self.answers[node] = dialed.answers[0] if dialed.answers else ""

    def _settle(self, nodes: dict[int, NodeFollower], now: float) -> Failure | None:
        self.asked_at, self.due_at = 0.0, now + NEXT_DIAL_SECONDS
        failed = {node: reason for node, reason in sorted(self.answers.items()) if reason}
        if 0 not in self.answers or REFUSED in self.answers[0]:
            failed = {}
        again = self.failed_before & failed.keys()
        self.failed_before = frozenset(failed)
        if not again:
            return None
        self.over = True
        whys = "; ".join(f"node {n} ({nodes[n].node.name}): {failed[n]}" for n in sorted(again))
        message = f"the ranks cannot meet at {self.master}, the master's port: from {whys}"
        return Failure(
            0, nodes[0].node.name, None, time.time(), "communication", message, fix=OPEN_ALL
        )


# Notices, soon after ranks have begun or when they hang, that nodes cannot reach each other.

LINKS_AFTER_SECONDS = 10.0  # from the first rank on: many jobs are in their first steps
LISTEN_SECONDS = 40.0  # both rounds of calls are over by then
MOST_NAMED = 3
ALL_PAIRS = 32  # nodes: with more of them, each calls only some


def some_others(at: int, nodes: Sequence[int]) -> list[int]:
    """Return whom the node at this place calls: all, or those 1, 2, 4, 8 ... places further on.

    Then each calls and is called by a few, and a firewall of one node, or between two halves of
    the list, is met by several calls. All pairs of 512 nodes would send 17 GB.
    """
    count = len(nodes)
    steps = range(1, count) if count <= ALL_PAIRS else (1 << n for n in range(count.bit_length()))
    return [nodes[(at + step) % count] for step in steps if step < count]


class LinkMonitor:
    """Lets nodes call each other, once ranks have begun or at once; tells which fail twice.

    Ranks open connections from each to each, at ports that nobody knows before. Where a firewall
    drops those they wait in silence: two minutes with gloo, longer with NCCL.
    """

    def __init__(self, nodes: Sequence[NodeRecord], *, at_once: bool = False) -> None:
        self.nodes = {node.index: node for node in nodes}
        self.words = {index: secrets.token_hex(8) for index in self.nodes}
        self.ports: dict[int, int] = {}  # node -> where it listens
        self.calls: dict[int, list[int]] = {}  # node -> whom it calls
        self.silent: dict[tuple[int, int], str] = {}  # who cannot reach whom, and why
        self.before: dict[tuple[int, int], str] = {}
        self.steps = iter((self._listen, self._dial, self._dial_again, self._describe))
        self.due_at = time.monotonic() if at_once else 0.0
        self.pending: set[int] = set()  # nodes that have not answered yet
        self.over = len(self.nodes) < 2

    def check(self, followers: Sequence[NodeFollower], *, begun: bool) -> str:
        """Return what is wrong, once it is known; never waits."""
        now = time.monotonic()
        if not begun:
            self.due_at = now + LINKS_AFTER_SECONDS
        self.over = self.over or not self.due_at  # this head came to a job that had begun
        if self.over or now < self.due_at:
            return ""
        self.due_at = now + ANSWER_SECONDS
        return next(self.steps)(followers)

    def answer(self, node: int, answer: Listening | Dialed) -> None:
        if isinstance(answer, Listening):
            self.ports[node] = answer.ports[0] if answer.ports else 0
        else:
            answers = zip(self.calls.get(node, ()), answer.answers, strict=False)
            self.silent.update({(node, called): reason for called, reason in answers if reason})
        self.pending.discard(node)
        if not self.pending:
            self.due_at = time.monotonic()

    def _ask(self, followers: Sequence[NodeFollower], requests: Mapping[int, Dial | Listen]) -> str:
        self.pending = {follower.node.index for follower in followers}
        for follower in followers:
            follower.ask(requests[follower.node.index])
        return ""

    def _listen(self, followers: Sequence[NodeFollower]) -> str:
        requests = {
            node: Listen(ports=(0,), word=word, seconds=LISTEN_SECONDS)
            for node, word in self.words.items()
        }
        return self._ask(followers, requests)

    def _dial(self, followers: Sequence[NodeFollower]) -> str:
        there = {node for node, port in self.ports.items() if port}
        self.calls = {
            node: [other for other in some_others(at, list(self.nodes)) if other in there]
            for at, node in enumerate(self.nodes)
        }
        places = {n: (self.nodes[n].address, self.ports[n], self.words[n]) for n in there}
        requests = {
            node: Dial(places=tuple(places[other] for other in others), seconds=DIAL_SECONDS)
            for node, others in self.calls.items()
        }
        return self._ask(followers, requests)

    def _dial_again(self, followers: Sequence[NodeFollower]) -> str:
        self.over = not self.silent
        self.before, self.silent = self.silent, {}
        return "" if self.over else self._dial(followers)

    @property
    def most_apart(self) -> NodeRecord | None:
        """Return the node that most calls failed with, both times; of several, the last."""
        failed = Counter(node for call in self.silent.keys() & self.before for node in call)
        index = max(failed, key=lambda node: (failed[node], node), default=None)
        return None if index is None else self.nodes[index]

    def _describe(self, _: Sequence[NodeFollower]) -> str:
        self.over = True
        said = [
            f"node {node} ({self.nodes[node].name}) calls node {called}"
            f" ({self.nodes[called].name}) at {self.nodes[called].address}: {reason}"
            for (node, called), reason in sorted(self.silent.items())
            if (node, called) in self.before
        ]
        if not said:
            return ""
        more = len(said) - MOST_NAMED
        said[MOST_NAMED:] = [f"and {plural(more, 'more call')}"] * (more > 0)
        return f"nodes cannot reach each other: {'; '.join(said)}"
