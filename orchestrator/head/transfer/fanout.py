"""Bring a tree to all nodes: directly, or to two that pass it on to two others each, and so on.

A node that cannot take the tree from the one before it gets it from here; a node that is lost takes
no other with it. Every content is checked where it arrives, and the tree when it is made.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.common.text import plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.probed_node import OWN_BRIDGES, listed
from orchestrator.head.transfer.batches import Changed
from orchestrator.head.transfer.code.scan import Tree
from orchestrator.head.transfer.send import Outbox, Seen, Sent
from orchestrator.head.transfer.take import QUICK_SECONDS, take
from orchestrator.protocol.facts import Address
from orchestrator.protocol.requests.transfer import (
    EndGiving,
    GiveTree,
    Giving,
    GivingNode,
    Lacking,
    TakeTree,
)

WIDTH = 2  # nodes that the head sends to, and that each node passes on to
AUTO_NODES = 5  # fewer are served directly,
AUTO_BYTES = 32 << 20  # and so is what is no burden: before compression, for all nodes together
TRANSFER_SECONDS = 3600.0
MOST_ADDRESSES = 3  # of one node, tried one after the other

Say = Callable[[str], None]


@dataclass(frozen=True)
class Fanout:
    """When nodes pass a tree on to each other."""

    nodes: int | None = AUTO_NODES  # with so many; None: never
    least: int = AUTO_BYTES

    @staticmethod
    def of(setting: int | bool | str) -> Fanout:
        """Read `sync.fanout`: auto, off, or a number of nodes, then whatever the size."""
        if isinstance(setting, str):
            return Fanout()
        return Fanout(None) if setting is False else Fanout(max(setting, WIDTH + 1), 0)

    def pays(self, nodes: int, size: int) -> bool:
        enough = self.nodes is not None and nodes >= self.nodes
        return enough and (nodes - WIDTH) * size >= self.least


def send_tree(
    reached: Sequence[Reached],
    tree: Tree,
    seen: Seen = lambda _: None,
    fanout: Fanout = Fanout(None),
    say: Say = lambda _: None,
) -> list[Sent | OrchestratorError]:
    """Send a tree to nodes; return what each lacked, or its error. seen() hears of the bytes.

    Raises Changed where a file was edited since the tree was read: read it again. What has arrived
    stays.
    """
    outbox = Outbox(tree, seen)
    try:
        if not fanout.pays(len(reached), tree.size + len(tree.listing)):
            return fleet.everywhere(reached, lambda node: outbox.send(node.channel))
        return Cascade(outbox, reached, fanout, say).run()
    finally:
        outbox.close()


class Cascade:
    """The way of one tree from node to node. The first two get it from here; see `parent`."""

    def __init__(
        self, outbox: Outbox, reached: Sequence[Reached], fanout: Fanout, say: Say
    ) -> None:
        self.outbox, self.reached, self.fanout, self.say = outbox, reached, fanout, say
        self.offers: list[Lacking | OrchestratorError] = []  # to the first, and what they lack
        self.tokens: dict[int, str] = {}
        self.ports: dict[int, int] = {}
        self.failed = [threading.Event() for _ in reached]
        self.lock = threading.Lock()  # of `direct`, which all nodes' threads tell
        self.direct: list[str] = []  # nodes that could not take it from another

    def run(self) -> list[Sent | OrchestratorError]:
        """Ask the first nodes what they lack, to see whether it pays; then serve all."""
        first = self.reached[:WIDTH]
        self.offers = fleet.everywhere(first, lambda node: self.outbox.offer(node.channel))
        lacking = [offer for offer in self.offers if isinstance(offer, Lacking)]
        size = max((self.outbox.batches_for(offer).size for offer in lacking), default=0)
        if self.fanout.pays(len(self.reached), size + len(self.outbox.listing)):
            self.find_givers()
        results = fleet.everywhere(range(len(self.reached)), self.serve)
        for at, result in enumerate(results):
            if at in self.ports and not isinstance(result, OrchestratorError):
                with contextlib.suppress(NodeError):  # it is heard by the next question
                    self.reached[at].channel.tell(EndGiving())
        if len(self.direct) > 1:
            others = plural(len(self.direct) - 1, "other node")
            self.say(f"files were sent from here to {others}, too: {listed(self.direct[1:])}")
        return results

    def find_givers(self) -> None:
        """Let those nodes listen that others will call."""
        inner = sorted({parent(at) for at in range(WIDTH, len(self.reached))})
        asked = {
            at: GiveTree(
                tree=self.outbox.tree.digest,
                token=secrets.token_hex(32),
                seconds=TRANSFER_SECONDS,
            )
            for at in inner
        }
        answers = fleet.ask([self.reached[at] for at in inner], list(asked.values()), QUICK_SECONDS)
        for at, answer in zip(inner, answers, strict=True):
            if isinstance(answer, Giving) and answer.port:
                self.tokens[at], self.ports[at] = asked[at].token, answer.port

    def serve(self, at: int) -> Sent:
        channel = self.reached[at].channel
        try:
            if at < WIDTH:
                offer = self.offers[at]
                if isinstance(offer, OrchestratorError):
                    raise offer
                return self.outbox.deliver(channel, offer)
            if parent(at) not in self.ports:
                return self.outbox.send(channel)
            return self.pass_on(at)
        except BaseException:
            self.failed[at].set()
            raise

    def pass_on(self, at: int) -> Sent:
        """Let a node take the tree from the one before it; send here what does not come so."""
        channel, before = self.reached[at].channel, parent(at)
        giver = GivingNode(
            addresses=places(self.reached[before], self.reached[at]),
            port=self.ports[before],
            token=self.tokens[before],
        )
        tree = self.outbox.tree
        request = TakeTree(
            tree=tree.digest, size=len(tree.listing), giver=giver, seconds=TRANSFER_SECONDS
        )
        failed = self.failed[before]
        taken = take(channel, request, self.outbox.seen, lambda _: failed.is_set())
        if not taken.problem:
            return Sent(taken.files, taken.size)
        self.tell(at, before, taken.problem)
        rest = self.outbox.send(channel)
        return Sent(max(taken.files, rest.files), taken.size + rest.size)

    def tell(self, at: int, before: int, why: str) -> None:
        """Say that a node is served from here; of the first with the reason."""
        here, there = self.reached[at].node.name, self.reached[before].node.name
        with self.lock:
            self.direct.append(here)
            if len(self.direct) == 1:
                why = why.encode("ascii", "replace").decode()[:200]
                self.say(f"{here} cannot take files from {there} ({why}): they are sent from here")


def parent(at: int) -> int:
    """Return the number of the node that passes on to this one."""
    return at // WIDTH - 1


def places(giver: Reached, taker: Reached) -> tuple[str, ...]:
    """Return the addresses of one node where another may reach it, the best first."""
    networks = [address.network for address in taker.facts.addresses if is_own(address)]
    speeds = {interface.name: interface.speed or 0 for interface in giver.facts.interfaces}
    shared = [
        address
        for address in giver.facts.addresses
        if is_own(address) and any(address.ip in network for network in networks)
    ]
    chosen = giver.node.ifname
    shared.sort(key=lambda each: (each.interface != chosen, -speeds.get(each.interface, 0)))
    found = [address.address for address in shared]
    reached = giver.channel.connection.address
    if reached and reached not in found:  # on one machine, or behind a router
        found.insert(1, reached)
    return tuple(found[:MOST_ADDRESSES])


def is_own(address: Address) -> bool:
    """Tell whether no other machine has this address, too."""
    alone = address.ip.is_loopback or address.ip.is_link_local
    return not alone and not address.interface.startswith(OWN_BRIDGES)


__all__ = ["Changed", "Fanout", "Sent", "send_tree"]
