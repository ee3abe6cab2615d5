"""Notices, soon after ranks have begun, that nodes cannot reach each other."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.common.text import plural
from orchestrator.head.follow.monitors.start_monitor import ANSWER_SECONDS, DIAL_SECONDS, OPEN_ALL
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.protocol.requests.machine import Dial, Dialed, Listen, Listening
from orchestrator.records.experiment import NodeRecord

LINKS_AFTER = 10.0  # seconds from the first rank on: many jobs are in their first steps
LISTEN_SECONDS = 40.0  # both rounds of calls are over by then
MOST_NAMED = 3


class LinkMonitor:
    """Lets all nodes call each other once ranks have begun, and tells which calls fail twice.

    Ranks open connections from each to each, at ports that nobody knows before. Where a firewall
    drops those they wait in silence: two minutes with gloo, longer with NCCL.
    """

    def __init__(self, nodes: Sequence[NodeRecord]) -> None:
        self.nodes = {node.index: node for node in nodes}
        self.words = {index: secrets.token_hex(8) for index in self.nodes}
        self.ports: dict[int, int] = {}  # node -> where it listens
        self.calls: dict[int, list[int]] = {}  # node -> whom it calls
        self.silent: dict[tuple[int, int], str] = {}  # who cannot reach whom, and why
        self.before: dict[tuple[int, int], str] = {}
        self.steps = iter((self._listen, self._dial, self._dial_again, self._tell))
        self.due_at = 0.0
        self.pending: set[int] = set()  # nodes that have not answered yet
        self.over = len(self.nodes) < 2

    def look(self, followers: Sequence[NodeFollower], *, begun: bool) -> str:
        """Return what is wrong, once it is known; never waits."""
        now = time.monotonic()
        if not begun:
            self.due_at = now + LINKS_AFTER
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
            self.silent.update({(node, called): why for called, why in answers if why})
        self.pending.discard(node)
        if not self.pending:
            self.due_at = time.monotonic()

    def _ask(self, followers: Sequence[NodeFollower], requests: Mapping[int, Any]) -> str:
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
        there = [node for node, port in self.ports.items() if port]
        self.calls = {node: [other for other in there if other != node] for node in self.nodes}
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

    def _tell(self, _: Sequence[NodeFollower]) -> str:
        self.over = True
        said = [
            f"node {node} ({self.nodes[node].name}) calls node {called}"
            f" ({self.nodes[called].name}) at {self.nodes[called].address}: {why}"
            for (node, called), why in sorted(self.silent.items())
            if (node, called) in self.before
        ]
        if not said:
            return ""
        more = len(said) - MOST_NAMED
        said[MOST_NAMED:] = [f"and {plural(more, 'more call')}"] * (more > 0)
        return f"WARNING: nodes cannot reach each other: {'; '.join(said)}; {OPEN_ALL}"
