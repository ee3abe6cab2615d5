"""The base class of monitors, which query nodes without blocking; the monitor of a start."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, TypeVar

from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.verdict import Failure
from orchestrator.protocol.requests.machine import Dial
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.timing import DIAL_SECONDS, QUICK_ANSWER_SECONDS

T = TypeVar("T")


class Watcher(Generic[T]):
    """Runs watch(), a generator that yields the seconds to its next step and returns a finding.

    The head calls check() ten times a second, and puts the nodes' answers into `answers`.
    """

    def __init__(self, after: float = 0.0) -> None:
        # The followers of the nodes that are queried.
        self.followers: Sequence[NodeFollower] = ()
        # The answer to the latest request by node index.
        self.answers: dict[int, Any] = {}
        self.due_at = time.monotonic() + after
        self.steps = self.watch()
        self.over = False

    def watch(self) -> Generator[float, None, T | None]:
        raise NotImplementedError

    def check(self, followers: Sequence[NodeFollower]) -> T | None:
        """Run the next step if it is due; return the finding once, else None."""
        self.followers, now = followers, time.monotonic()
        if self.over or now < self.due_at:
            return None
        try:
            self.due_at = now + next(self.steps)
        except StopIteration as end:
            self.over = True
            found: T | None = end.value
            return found
        return None

    def ask_and_hear(self, question: Callable[[NodeFollower], Request[Any]]) -> Iterator[float]:
        """Send a request to every node; yield until all answer, or for a limited time."""
        self.answers = {}
        for follower in self.followers:
            follower.ask(question(follower))
        until = time.monotonic() + QUICK_ANSWER_SECONDS
        while len(self.answers) < len(self.followers) and time.monotonic() <= until:
            yield 0.0


# By then the ranks of most jobs have started.
FIRST_DIAL_SECONDS = 6.0
NEXT_DIAL_SECONDS = 4.0
# By then both dials are over.
DIALS_WITHIN_SECONDS = 30.0
REFUSED = "refused"
OPEN_ALL = (
    "open all TCP ports between the nodes, as collectives use any of them; `orchestrator doctor`"
    " shows what is blocked"
)


class StartMonitor(Watcher[Failure]):
    """Makes every node dial the master's port, until a rank starts or the same dials fail twice.

    Torchrun starts no rank before all nodes have connected to that port, and is silent until
    then. If the master itself is refused, its torchrun is only slow, as it still imports torch.
    """

    def __init__(self, master: str) -> None:
        super().__init__(after=FIRST_DIAL_SECONDS)
        self.master = master
        self.over = not master

    def check(self, followers: Sequence[NodeFollower], *, begun: bool = False) -> Failure | None:
        """Return the failure once it is known, else None. `begun`: a rank has started."""
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
