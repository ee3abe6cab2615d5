"""Bring files to all nodes: directly, or to two that pass them on to two others each, and so on.

A node that cannot take them from the one before it gets them from here; a node that is lost takes
no other with it. Who gives to whom is decided in schedule.py; here that is carried out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.common.hosts import listed
from orchestrator.common.text import Say, plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.facts import OWN_BRIDGES
from orchestrator.head.screen.progress import Progress
from orchestrator.head.transfer.peer import QUICK_SECONDS, NodeTree, Peer
from orchestrator.head.transfer.schedule import HEAD, WIDTH, Order, Rules, Schedule
from orchestrator.head.transfer.send import PUT_SECONDS, Outbox, Seen, Sender, Sent
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.facts import Address
from orchestrator.protocol.requests.transfer import EndGiving, Give, GivingNode, Place, Take, Taken

AUTO_NODES = 5  # fewer are served directly,
AUTO_BYTES = 32 << 20  # and so is what is no burden: before compression, for all nodes together
LONGEST_SECONDS = 86400.0  # of one transfer: terabytes over a slow line
MOST_ADDRESSES = 3  # of one node, tried one after the other
LOOK_SECONDS = 0.02  # between two looks at who else takes files from a node
log = logging.getLogger(__name__)

WAIT_SECONDS = 0.2  # before it is asked again whether anybody still wants the files
PASSING_THROUGH = threading.RLock()

T = TypeVar("T")
P = TypeVar("P", bound=Peer)


@dataclass(frozen=True)
class PassingOn:
    """When nodes pass files on to each other."""

    nodes: int | None = AUTO_NODES  # with so many; None: never
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


class CannotTake(NodeError):
    """A node is there, and cannot take files from another."""


def send_to_all(
    peers: Sequence[Peer],
    places: Sequence[Place],
    tree: Tree,
    seen: Seen = lambda _: None,
    passing_on: PassingOn = NEVER,
    say: Say = lambda _: None,
    before: bytes = b"",
) -> list[Sent | OrchestratorError]:
    """Send a tree to nodes; return what each lacked, or its error. seen() hears of the bytes.

    The tree has all checksums, or nodes do not pass it on. `before` is the list of a tree that
    their stores may have.
    """
    outbox = Outbox(tree, before)
    pairs = zip(peers, places, strict=True)
    senders = [Sender(outbox, peer, into, seen) for peer, into in pairs]
    try:
        return send(senders, passing_on, say)
    finally:
        outbox.close()


def send(
    senders: Sequence[Sender], passing_on: PassingOn, say: Say
) -> list[Sent | OrchestratorError]:
    """Let nodes pass the files on where that pays, by what the first ones lack; else serve all."""
    tree, count = senders[0].outbox.tree if senders else None, len(senders)
    if tree is None or not passing_on.pays(count, tree.size + len(tree.listing)):
        return fleet.everywhere(senders, Sender.go)
    fleet.everywhere(senders[:WIDTH], lambda sender: sender.lacking or sender.offer())
    lacked = set[int]().union(*(sender.numbers() for sender in senders))
    size = sum(tree.entries[number].size for number in lacked)
    if not passing_on.pays(count, size + senders[0].outbox.list_bytes):
        return fleet.everywhere(senders, Sender.go)
    served = ServedFromHere(say, "they are sent from here")
    results = Spread(senders, served).run()
    served.sum_up()
    return results


def carry_out(
    schedule: Schedule,
    work: Callable[[Order], T],
    prepare: Callable[[Collection[int]], None] = lambda _: None,
) -> dict[int, T | OrchestratorError]:
    """Carry out all orders of a schedule, each in a task; return each taker's result or error.

    work() raises CannotTake where another order may do better; any other error of ours means that
    the node is lost. prepare() hears of nodes that will give before others are sent to them.
    """
    results: dict[int, T | OrchestratorError] = {}
    ended: queue.SimpleQueue[tuple[Order, T | BaseException]] = queue.SimpleQueue()

    def run(order: Order) -> None:
        try:
            ended.put((order, work(order)))
        except BaseException as error:  # noqa: BLE001  what is a defect is raised again below
            ended.put((order, error))

    while not schedule.is_over:
        orders = schedule.orders()
        prepare({order.giver for order in orders if order.giver != HEAD})
        for order in orders:
            fleet.start(partial(run, order))
        order, result = ended.get()
        if isinstance(result, (CannotTake, OrchestratorError)):
            log.debug("taker %d, from %d: %s", order.taker, order.giver, result)
        if isinstance(result, CannotTake):
            schedule.failed(order.taker)
        elif isinstance(result, OrchestratorError):
            schedule.lost(order.taker)
        elif isinstance(result, BaseException):
            raise result
        else:
            schedule.took(order.taker)
        results[order.taker] = result
    return results


class ServedFromHere:
    """Says which nodes could not take files from another one; of the first with the reason."""

    def __init__(self, say: Say, how: str) -> None:
        self.say, self.how = say, how
        self.nodes: list[str] = []
        self.lock = threading.Lock()

    def note(self, taker: str, giver: str, problem: str) -> None:
        with self.lock:
            self.nodes.append(taker)
            if len(self.nodes) == 1:
                reason = problem.encode("ascii", "replace").decode()[:200]
                self.say(f"{taker} cannot take files from {giver} ({reason}): {self.how}")

    def sum_up(self) -> None:
        if len(self.nodes) > 1:
            others = plural(len(self.nodes) - 1, "other node")
            self.say(f"files were sent from here to {others}, too: {listed(self.nodes[1:])}")


class Spread:
    """The way of one tree to nodes, from here or from the node that has it."""

    @classmethod
    def from_node(
        cls,
        tree: NodeTree,
        takers: Mapping[P, Place],
        served: ServedFromHere,
        rules: Rules,
        stopped: Callable[[], None],
        seen: Seen,
    ) -> Spread:
        outbox = Outbox(tree)
        senders = [Sender(outbox, peer, place, seen) for peer, place in takers.items()]
        return cls(senders, served, rules, stopped)

    def __init__(
        self,
        senders: Sequence[Sender],
        served: ServedFromHere,
        rules: Rules = Rules(),  # noqa: B008  it has no state
        stopped: Callable[[], None] = lambda: None,
    ) -> None:
        self.senders, self.served, self.stopped = list(senders), served, stopped
        self.outbox = senders[0].outbox
        tree, takers = self.outbox.tree, range(len(senders))
        self.origin = tree.peer if isinstance(tree, NodeTree) else None  # its number is the last
        sites = {at: sender.peer.site for at, sender in enumerate(senders)}
        origin = HEAD if self.origin is None else len(takers)
        self.schedule = Schedule(takers, (origin,), rules, sites)
        self.givers: dict[int, GivingNode] = {}
        self.problems: dict[int, tuple[str, str]] = {}  # of a taker: from whom it could not, why

    def run(self) -> list[Sent | OrchestratorError]:
        """Serve all; return what each lacked, or its error."""
        try:
            results = carry_out(self.schedule, self.serve, self.let_give)
        finally:
            self.end_giving()
        self.stopped()
        return [results[at] for at in range(len(self.senders))]

    def peer(self, number: int) -> Peer:
        if self.origin is not None and number == len(self.senders):
            return self.origin
        return self.senders[number].peer

    def let_give(self, nodes: Collection[int]) -> None:
        """Let those nodes listen that others will call."""

        def ask(at: int) -> None:
            peer, token = self.peer(at), secrets.token_hex(32)
            here = Place(directory=os.fsdecode(self.outbox.tree.directory))
            place = here if peer is self.origin else self.senders[at].into
            request = Give(
                manifest=self.outbox.tree.digest, place=place, token=token, seconds=LONGEST_SECONDS
            )
            with peer.lock:
                if peer is self.origin:
                    peer.open.put(self.outbox.packed, PUT_SECONDS)
                port = peer.open.ask(request, QUICK_SECONDS).port
            if port:
                self.givers[at] = GivingNode(addresses=(), port=port, token=token)

        fleet.everywhere(sorted(nodes - self.givers.keys()), ask)

    def end_giving(self) -> None:
        for at in self.givers.keys() - self.schedule.given_up:
            with contextlib.suppress(NodeError), self.peer(at).lock:  # the next question hears it
                self.peer(at).open.post(EndGiving(manifest=self.outbox.tree.digest))

    def serve(self, order: Order) -> Sent:
        """Let a node have the files from here, or from another node."""
        sender = self.senders[order.taker]
        giver_name = "here" if order.giver == HEAD else self.peer(order.giver).name
        wait = order.pause_seconds
        log.debug("%s: is to have files from %s, in %g s", sender.peer.name, giver_name, wait)
        self.wait(wait)
        with sender.peer.taking:
            if order.giver == HEAD:
                return self.serve_from_here(order.taker, sender)
            giver = self.peer(order.giver)
            while not giver.callers.acquire(blocking=False):
                self.stopped()
                time.sleep(LOOK_SECONDS)
            try:
                taken = self.take(order, sender)
            finally:
                giver.callers.release()
        if taken.problem:
            self.problems[order.taker] = giver.name, taken.problem
            raise CannotTake(taken.problem)
        return sender.result

    def serve_from_here(self, taker: int, sender: Sender) -> Sent:
        """Send the files; those of a node pass through here, for one node at a time.

        Each holds the channels of two nodes, and so they cannot wait for each other.
        """
        if taker in self.problems:
            self.served.note(sender.peer.name, *self.problems[taker])
        if self.origin is None:
            with sender.peer.lock:
                return sender.go()
        with PASSING_THROUGH, sender.peer.lock:
            self.stopped()
            sent = sender.go()
        for path, reason in sent.failed.items():
            names = [self.origin.name] if path in sender.unread else []
            raise NodeError(f"{os.fsdecode(path)}: {reason}", names=names)
        return sent

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.stopped()
            time.sleep(WAIT_SECONDS)

    def take(self, order: Order, sender: Sender) -> Taken:
        """Let a node take the files from another, and follow that to its end."""
        giver = self.givers.get(order.giver)
        if giver is None:
            return Taken(size=0, over=True, problem="it may not listen for others")
        addresses = places(self.peer(order.giver), sender.peer)
        request = Take(
            manifest=self.outbox.tree.digest,
            size=len(self.outbox.tree.listing),
            into=sender.into,
            giver=giver.replace(addresses=addresses),
            seconds=LONGEST_SECONDS,
        )

        def give_up() -> bool:
            self.stopped()
            return order.giver in self.schedule.given_up

        taken = sender.peer.take(request, sender.seen, give_up)
        sender.took(taken)
        return taken


def exchange(spreads: Sequence[Spread], progress: Progress) -> dict[Peer, OrchestratorError]:
    """Carry out several at once, between the same nodes; return which nodes lack something now."""
    try:
        outcomes = fleet.everywhere(spreads, Spread.run)
    finally:
        progress.clear()
        for spread in spreads:
            spread.outbox.close()
    failed: dict[Peer, OrchestratorError] = {}
    for spread, results in zip(spreads, outcomes, strict=True):
        if isinstance(results, OrchestratorError):
            raise results
        for sender, result in zip(spread.senders, results, strict=True):
            if isinstance(result, OrchestratorError):
                failed[sender.peer] = result
    return failed


def places(giver: Peer, taker: Peer) -> tuple[str, ...]:
    """Return the addresses of one node where another may reach it, the best first."""
    reached = giver.open.connection.address
    if giver.reached is None or taker.reached is None:
        return tuple(filter(None, dict.fromkeys((giver.address, reached))))
    facts = giver.reached.facts
    networks = [address.network for address in taker.reached.facts.addresses if is_ours(address)]
    speeds = {interface.name: interface.speed or 0 for interface in facts.interfaces}
    shared = [
        address
        for address in facts.addresses
        if is_ours(address) and any(address.ip in network for network in networks)
    ]
    chosen = giver.reached.node.ifname
    shared.sort(
        key=lambda address: (address.interface != chosen, -speeds.get(address.interface, 0))
    )
    found = [address.address for address in shared]
    if reached and reached not in found:  # on one machine, or behind a router
        found.insert(1, reached)
    return tuple(found[:MOST_ADDRESSES])


def is_ours(address: Address) -> bool:
    """Tell whether no other machine has this address, too."""
    alone = address.ip.is_loopback or address.ip.is_link_local
    return not alone and not address.interface.startswith(OWN_BRIDGES)
