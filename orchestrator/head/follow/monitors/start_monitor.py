"""Notices that nodes cannot reach the port where the ranks meet."""

from __future__ import annotations

import time
from collections.abc import Sequence

from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.verdict import Failure
from orchestrator.protocol.requests.machine import Dial, Dialed

FIRST_DIAL = 6.0  # seconds: by then the ranks of most jobs have begun
NEXT_DIAL = 4.0
DIAL_SECONDS = 3.0
ANSWER_SECONDS = 10.0  # nodes that have not answered by then are left out
DIALS_WITHIN = 30.0  # both dials are over by then
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
        self.due_at = time.monotonic() + FIRST_DIAL
        self.asked_at = 0.0
        self.over = False
        self.answers: dict[int, str] = {}  # node -> why it cannot reach the port, or nothing
        self.failed_before: frozenset[int] = frozenset()

    def look(self, followers: Sequence[NodeFollower], *, begun: bool) -> Failure | None:
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
        self.asked_at, self.due_at = 0.0, now + NEXT_DIAL
        failed = {node: why for node, why in sorted(self.answers.items()) if why}
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
