"""Notices that nodes cannot reach the port where the ranks meet, or later each other."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Generator, Sequence

from orchestrator.common.text import plural
from orchestrator.head.follow.monitors.watcher import Watcher
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.verdict import Failure
from orchestrator.protocol.requests.machine import Dial, Dialed, Listen, Listening
from orchestrator.records.experiment import NodeRecord

FIRST_DIAL_SECONDS = 6.0  # by then the ranks of most jobs have begun
NEXT_DIAL_SECONDS = 4.0
DIAL_SECONDS = 3.0
DIALS_WITHIN_SECONDS = 30.0  # both dials are over by then
REFUSED = "refused"
OPEN_ALL = (
    "open all TCP ports between the nodes, as collectives use any of them; `orchestrator doctor`"
    " shows what is blocked, with the command for the firewall that runs there"
)
LINKS_AFTER_SECONDS = 10.0  # from the first rank on: many jobs are in their first steps
LISTEN_SECONDS = 40.0  # both rounds of calls are over by then
MOST_NAMED = 3
ALL_PAIRS = 32  # nodes: with more of them, each calls only some


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


def some_others(at: int, nodes: Sequence[int]) -> list[int]:
    """Return the nodes to be called from one: all others, or those 1, 2, 4, 8 ... places on.

    Then each calls and is called by a few, and a firewall of one node, or between two halves of
    the list, is met by several calls. All pairs of 512 nodes would send 17 GB.
    """
    count = len(nodes)
    steps = range(1, count) if count <= ALL_PAIRS else (1 << n for n in range(count.bit_length()))
    return [nodes[(at + step) % count] for step in steps if step < count]


class LinkMonitor(Watcher[str]):
    """Lets nodes call each other, once ranks have begun or at once; tells which calls fail twice.

    Ranks open connections from each to each, at ports that no rule can name. Where a firewall drops
    those they wait in silence: two minutes with gloo, longer with NCCL.
    """

    def __init__(self, nodes: Sequence[NodeRecord], *, at_once: bool = False) -> None:
        super().__init__()
        self.nodes = {node.index: node for node in nodes}
        self.at_once, self.begun = at_once, False
        self.failed: dict[tuple[int, int], str] = {}  # caller and called, twice -> why
        self.over = len(nodes) < 2

    def check(self, followers: Sequence[NodeFollower], *, begun: bool = False) -> str:
        """Return what is wrong, once it is known."""
        self.begun = begun
        return super().check(followers) or ""

    def watch(self) -> Generator[float, None, str]:
        if not self.at_once:
            if self.begun:  # before this head came
                return ""
            while not self.begun:
                yield 0.0
            yield LINKS_AFTER_SECONDS
        words = {index: secrets.token_hex(8) for index in self.nodes}
        yield from self.ask_and_hear(
            lambda f: Listen(ports=(0,), word=words[f.node.index], seconds=LISTEN_SECONDS)
        )
        places = {
            node: (self.nodes[node].address, answer.ports[0], words[node])
            for node, answer in self.answers.items()
            if isinstance(answer, Listening) and answer.ports and answer.ports[0]
        }
        calls = {
            node: [other for other in some_others(at, list(self.nodes)) if other in places]
            for at, node in enumerate(self.nodes)
        }
        dials = {
            node: Dial(places=tuple(places[other] for other in others), seconds=DIAL_SECONDS)
            for node, others in calls.items()
        }
        before: set[tuple[int, int]] = set()
        for _ in range(2):
            yield from self.ask_and_hear(lambda f: dials[f.node.index])
            failed = {
                (node, called): why
                for node, dialed in self.answers.items()
                if isinstance(dialed, Dialed)
                for called, why in zip(calls[node], dialed.answers, strict=False)
                if why
            }
            if not failed:
                return ""
            self.failed = {call: why for call, why in failed.items() if call in before}
            before = set(failed)
        return self.in_words()

    @property
    def most_apart(self) -> NodeRecord | None:
        """Return the node that most calls failed with, both times; of several, the last."""
        failed = Counter(node for call in self.failed for node in call)
        index = max(failed, key=lambda node: (failed[node], node), default=None)
        return None if index is None else self.nodes[index]

    def in_words(self) -> str:
        said = [
            f"node {node} ({self.nodes[node].name}) calls node {called}"
            f" ({self.nodes[called].name}) at {self.nodes[called].address}: {reason}"
            for (node, called), reason in sorted(self.failed.items())
        ]
        more = len(said) - MOST_NAMED
        said[MOST_NAMED:] = [f"and {plural(more, 'more call')}"] * (more > 0)
        return f"nodes cannot reach each other: {'; '.join(said)}" if said else ""
