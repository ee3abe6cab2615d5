"""Bring files to all nodes: directly, or to two that pass them on to two others each, and so on.

A node that cannot take them from the one before it gets them from here; a node that is lost takes
no other with it. Who gives to whom is decided in schedule.py; here that is carried out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.common.hosts import listed
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.facts import OWN_BRIDGES
from orchestrator.head.screen.output import say
from orchestrator.head.transfer.peer import Peer
from orchestrator.head.transfer.schedule import ORIGIN, WIDTH, givers
from orchestrator.head.transfer.send import Outbox, Seen, Sender, Sent
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.facts import Address
from orchestrator.protocol.requests.transfer import (
    AskTaken,
    EndGiving,
    Give,
    GivingNode,
    Place,
    Take,
)
from orchestrator.protocol.timing import ANSWER_SECONDS, FILE_ANSWER_SECONDS

# Fewer nodes are served directly.
AUTO_NODES = 5
# So is what is no burden: before compression, for all nodes together.
AUTO_BYTES = 32 << 20
# Of one node, tried one after the other.
MOST_ADDRESSES = 3
RETRY_SECONDS = 1.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassingOn:
    """When nodes pass files on to each other."""

    # From so many nodes on; None: never.
    nodes: int | None = AUTO_NODES
    least: int = AUTO_BYTES

    @staticmethod
    def of(setting: int | bool | str) -> PassingOn:
        """Read `sync.fanout`: auto, off, or a number of nodes, then whatever the size."""
        if isinstance(setting, str):
            return PassingOn()
        return PassingOn(None) if setting is False else PassingOn(max(setting, WIDTH + 1), 0)

    def pays(self, nodes: int, size: int) -> bool:
        enough = self.nodes is not None and nodes >= self.nodes
        return enough and (nodes - WIDTH) * size >= self.least


NEVER = PassingOn(None)


def peers(reached: Sequence[Reached]) -> list[Peer]:
    return [Peer(node.node.name, node.channel, node) for node in reached]


def first_failed(results: Sequence[Sent | OrchestratorError]) -> bytes:
    """Return the path of a file that could not come to a node as it was read, or nothing."""
    sent = (result for result in results if isinstance(result, Sent))
    return next((path for result in sent for path in sorted(result.failed)), b"")


def send_to_all(
    peers: Sequence[Peer],
    places: Sequence[Place],
    tree: Tree,
    seen: Seen = lambda _: None,
    passing_on: PassingOn = NEVER,
    origin: Peer | None = None,
    stopped: Callable[[], None] = lambda: None,
) -> list[Sent | OrchestratorError]:
    """Send a tree to nodes; return what each lacked, or its error. `seen` hears of the bytes.

    Nodes give it to each other where that pays, or where it is at the node `origin`. `stopped`
    raises an error once the files are no longer wanted.
    """
    outbox = Outbox(tree)
    pairs = zip(peers, places, strict=True)
    senders = [Sender(outbox, peer, into, seen) for peer, into in pairs]
    try:
        if origin is None and not passing_on.pays(len(senders), tree.size):
            return fleet.everywhere(senders, Sender.go)
        offered = fleet.everywhere(senders, Sender.offer)
        there = [sender for sender in offered if isinstance(sender, Sender)]
        lacking = [sender.size for sender in there if sender.numbers]
        if lacking and (origin is not None or passing_on.pays(len(lacking), max(lacking))):
            results = iter(Relay(there, origin, stopped).run())
        else:
            results = iter(fleet.everywhere(there, Sender.go))
        return [next(results) if isinstance(each, Sender) else each for each in offered]
    finally:
        outbox.close()


class CannotTake(Exception):
    """Raised where a node is there, and cannot take files from another."""


class Relay:
    """One tree on its way to nodes that pass it on; all of them have been offered it."""

    def __init__(
        self,
        senders: Sequence[Sender],
        origin: Peer | None,
        stopped: Callable[[], None],
    ) -> None:
        """`origin` is the node that has the files; without one they are here."""
        self.senders, self.origin, self.stopped = senders, origin, stopped
        # Nodes that lack nothing come first: the others take from them.
        order = sorted(range(len(senders)), key=lambda number: bool(senders[number].numbers))
        chosen = givers([senders[number].peer.site for number in order])
        self.giver_of = {
            number: ORIGIN if giver == ORIGIN else order[giver]
            for number, giver in zip(order, chosen, strict=True)
        }
        self.giving: dict[int, GivingNode] = {}
        # Nodes that take nothing more, and give nothing.
        self.lost: set[int] = set()
        # By the name of the node that cannot take: from which one, and why.
        self.problems: dict[str, tuple[str, str]] = {}

    def run(self) -> list[Sent | OrchestratorError]:
        """Serve all; return what each lacked, or its error."""
        numbers = set(self.giver_of.values()) - ({ORIGIN} if self.origin is None else set())
        try:
            fleet.everywhere(sorted(numbers), self.let_give)
            results = fleet.everywhere(range(len(self.senders)), self.serve)
        finally:
            for number in numbers - self.lost:
                # The next question to a node that is lost tells so.
                with contextlib.suppress(NodeError):
                    self.peer(number).post(EndGiving())
            self.say_problems()
        self.stopped()
        return results

    def peer(self, number: int) -> Peer:
        if number == ORIGIN:
            assert self.origin is not None
            return self.origin
        return self.senders[number].peer

    def let_give(self, number: int) -> None:
        """Let a node listen that others will call."""
        peer, token, here = self.peer(number), secrets.token_hex(32), None
        outbox = self.senders[0].outbox
        if number == ORIGIN:
            peer.open.put(outbox.packed, FILE_ANSWER_SECONDS)
            here = Place(directory=os.fsdecode(outbox.tree.directory))
        port = peer.ask(Give(token=token, here=here), ANSWER_SECONDS).port
        if port:
            self.giving[number] = GivingNode(addresses=(), port=port, token=token)

    def serve(self, number: int) -> Sent:
        """Let a node have the files from another one, or else from here."""
        sender, problem = self.senders[number], None
        try:
            for giver in self.ways(number):
                if problem is not None:
                    # A line that broke may come back.
                    time.sleep(RETRY_SECONDS)
                try:
                    self.take(sender, giver)
                except CannotTake as error:
                    problem = self.peer(giver).name, str(error)
                    log.debug("%s cannot take from %s: %s", sender.peer.name, *problem)
                else:
                    return sender.result
            if problem is not None and self.origin is not None:
                raise NodeError("it cannot take files from {} ({})".format(*problem))
            if problem is not None:
                self.problems[sender.peer.name] = problem
            return sender.go()
        except BaseException:
            self.lost.add(number)
            raise

    def ways(self, number: int) -> list[int]:
        """Return from which nodes one may take the files: in the end from the origin, if any."""
        giver = self.giver_of[number]
        if not self.senders[number].numbers:
            return []
        if self.origin is not None:
            return [giver, ORIGIN]
        return [] if giver == ORIGIN else [giver]

    def take(self, sender: Sender, number: int) -> None:
        """Let a node take the files from another, and follow that to its end."""
        giver = self.giving.get(number)
        if giver is None:
            raise CannotTake("it may not listen for others")
        if sender.numbers is None:
            sender.offer()
        addresses = places(self.peer(number), sender.peer)
        sender.peer.ask(Take(giver=giver.replace(addresses=addresses)), ANSWER_SECONDS)
        size, over = 0, False
        while not over:
            try:
                self.stopped()
            except OrchestratorError:
                sender.peer.ask(AskTaken(end=True), ANSWER_SECONDS)
                raise
            taken = sender.peer.ask(AskTaken(end=number in self.lost), ANSWER_SECONDS)
            sender.count(max(0, taken.size - size))
            size, over = max(size, taken.size), taken.over
        if taken.problem:
            # What has come is no longer lacking.
            sender.numbers = None
            raise CannotTake(taken.problem)
        sender.done()

    def say_problems(self) -> None:
        """Say which nodes could not take files from another one; of the first with the reason."""
        for taker, (giver, problem) in list(self.problems.items())[:1]:
            reason = problem.encode("ascii", "replace").decode()[:200]
            say(f"{taker} cannot take files from {giver} ({reason}): they are sent from here")
        if others := list(self.problems)[1:]:
            say(f"files were also sent from here to {listed(others)}")


def places(giver: Peer, taker: Peer) -> tuple[str, ...]:
    """Return the addresses of one node where another may reach it, the best first."""
    reached = giver.open.connection.address
    if giver.reached is None or taker.reached is None:
        return tuple(filter(None, dict.fromkeys((giver.address, reached))))
    facts = giver.reached.facts
    networks = [address.network for address in taker.reached.facts.addresses if is_own(address)]
    speeds = {interface.name: interface.speed or 0 for interface in facts.interfaces}
    shared = [
        address
        for address in facts.addresses
        if is_own(address) and any(address.ip in network for network in networks)
    ]
    chosen = giver.reached.node.ifname
    shared.sort(
        key=lambda address: (address.interface != chosen, -speeds.get(address.interface, 0))
    )
    found = [address.address for address in shared]
    if reached and reached not in found:  # on one machine, or behind a router
        found.insert(1, reached)
    return tuple(found[:MOST_ADDRESSES])


def is_own(address: Address) -> bool:
    """Return True if no other machine has this address."""
    alone = address.ip.is_loopback or address.ip.is_link_local
    return not alone and not address.interface.startswith(OWN_BRIDGES)
