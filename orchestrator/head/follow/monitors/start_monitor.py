"""Notices that nodes cannot reach the port where the ranks meet."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from orchestrator.head.follow.monitors.watcher import Watcher
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.verdict import Failure
from orchestrator.protocol.requests.machine import Dial

FIRST_DIAL_SECONDS = 6.0  # by then the ranks of most jobs have begun
NEXT_DIAL_SECONDS = 4.0
DIAL_SECONDS = 3.0
DIALS_WITHIN_SECONDS = 30.0  # both dials are over by then
REFUSED = "refused"
OPEN_ALL = (
    "open all TCP ports between the nodes, as collectives use any of them; `orchestrator doctor`"
    " shows what is blocked"
)


class StartMonitor(Watcher[Failure]):
    """Lets every node call the master's port, until a rank begins or the same calls fail twice.

    torchrun starts no rank before all nodes have met at that port, and says nothing until then.
    While the master itself is refused there, its torchrun is only slow: it still imports torch.
    """

    def __init__(self, master: str) -> None:
        super().__init__(after=FIRST_DIAL_SECONDS)
        self.master = master
        self.over = not master

    def check(self, followers: Sequence[NodeFollower], *, begun: bool = False) -> Failure | None:
        """Return what is wrong, once it is known. `begun`: a rank was heard of."""
        nodes = {follower.node.index for follower in followers}
        self.over = self.over or begun or len(nodes) < 2 or 0 not in nodes
        return super().check(followers)

    def watch(self) -> Generator[float, None, Failure]:
        address, _, port = self.master.rpartition(":")
        dial = Dial(places=((address, int(port), ""),), seconds=DIAL_SECONDS)
        before: set[int] = set()
        while True:
            yield from self.ask_and_hear(lambda _: dial)
            whys = {node: "".join(dialed.answers[:1]) for node, dialed in self.answers.items()}
            failed = {node: why for node, why in sorted(whys.items()) if why}
            if 0 not in whys or REFUSED in whys[0]:
                failed = {}
            if again := before & failed.keys():
                return self.failure({node: failed[node] for node in sorted(again)})
            before = set(failed)
            yield NEXT_DIAL_SECONDS

    def failure(self, whys: dict[int, str]) -> Failure:
        names = {follower.node.index: follower.node.name for follower in self.followers}
        calls = "; ".join(f"node {node} ({names[node]}): {why}" for node, why in whys.items())
        message = f"the ranks cannot meet at {self.master}, the master's port: from {calls}"
        return Failure(0, names[0], None, time.time(), "communication", message, fix=OPEN_ALL)
