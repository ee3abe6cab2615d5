"""Bring files to all nodes: directly, or to two that pass them on to two others each, and so on.

A node that cannot take them from the one before it gets them from here; a node that is lost takes
no other with it. Who gives to whom is decided in schedule.py; here that is carried out.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.common.text import Say, plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.facts import OWN_BRIDGES, listed
from orchestrator.head.transfer.schedule import HEAD, WIDTH, Order, Schedule
from orchestrator.head.transfer.send import Outbox, Seen, Sender, Sent
from orchestrator.head.transfer.take import QUICK_SECONDS, take
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.facts import Address
from orchestrator.protocol.requests.request import Beat
from orchestrator.protocol.requests.transfer import EndGiving, Give, GivingNode, Place, Take, Taken
from orchestrator.protocol.timing import HEAD_BEAT

AUTO_NODES = 5  # fewer are served directly,
AUTO_BYTES = 32 << 20  # and so is what is no burden: before compression, for all nodes together
LONGEST_SECONDS = 86400.0  # of one transfer: terabytes over a slow line
MOST_ADDRESSES = 3  # of one node, tried one after the other

T = TypeVar("T")


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


@dataclass(frozen=True)
class Peer:
    """A node that is to have files, and what is known of the ways to it."""

    name: str
    channel: NodeChannel
    into: Place
    reached: Reached | None = None  # with its facts, where it was probed


def peers(reached: Sequence[Reached], into: Place) -> list[Peer]:
    """Return nodes that were reached as those that are to have files, all in the same place."""
    return [Peer(node.node.name, node.channel, into, node) for node in reached]


def first_failed(results: Sequence[Sent | OrchestratorError]) -> bytes:
    """Return the path of a file that could not come to a node as it was read, or nothing."""
    sent = (result for result in results if isinstance(result, Sent))
    return next((path for result in sent for path in sorted(result.failed)), b"")


class CannotTake(NodeError):
    """A node is there, and cannot take files from another."""


def send_to_all(
    peers: Sequence[Peer],
    tree: Tree,
    seen: Seen = lambda _: None,
    passing_on: PassingOn = NEVER,
    say: Say = lambda _: None,
) -> list[Sent | OrchestratorError]:
    """Send a tree to nodes; return what each lacked, or its error. seen() hears of the bytes.

    The tree has all checksums, or nodes do not pass it on.
    """
    outbox = Outbox(tree)
    senders = [Sender(outbox, peer.channel, peer.into, seen) for peer in peers]
    try:
        if not passing_on.pays(len(peers), tree.size + len(tree.listing)):
            return fleet.everywhere(senders, Sender.go)
        return Spread(peers, senders, passing_on, say).run()
    finally:
        outbox.close()


def carry_out(
    schedule: Schedule,
    work: Callable[[Order], T],
    prepare: Callable[[Collection[int]], None] = lambda _: None,
) -> dict[int, T | OrchestratorError]:
    """Carry out all orders of a schedule, each in a thread; return each taker's result or error.

    work() raises CannotTake where another order may do better; any other error of ours means that
    the node is lost. prepare() hears of nodes that will give before others are sent to them.
    """
    results: dict[int, T | OrchestratorError] = {}
    ended: queue.SimpleQueue[tuple[Order, T | BaseException]] = queue.SimpleQueue()

    def run(order: Order) -> None:
        try:
            time.sleep(order.pause_seconds)
            ended.put((order, work(order)))
        except BaseException as error:  # noqa: BLE001  what is a defect is raised again below
            ended.put((order, error))

    while not schedule.is_over:
        orders = schedule.orders()
        prepare({order.giver for order in orders if order.giver != HEAD})
        for order in orders:
            threading.Thread(target=run, args=(order,), daemon=True).start()
        order, result = ended.get()
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


@contextlib.contextmanager
def kept_alive(senders: Sequence[Sender]) -> Iterator[None]:
    """Let nodes hear from us while we are busy with others: a server leaves a head that is silent.

    Nobody waits for the answers here; they are passed over by the next question.
    """
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEAD_BEAT):
            for sender in senders:
                if sender.lock.acquire(blocking=False):  # else somebody asks it something now
                    with contextlib.suppress(NodeError):  # whoever needs the node hears that
                        sender.channel.tell(Beat())
                    sender.lock.release()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Spread:
    """The way of one tree from node to node. The first two get it from here."""

    def __init__(
        self, peers: Sequence[Peer], senders: Sequence[Sender], passing_on: PassingOn, say: Say
    ) -> None:
        self.peers, self.senders = peers, list(senders)
        self.passing_on, self.say = passing_on, say
        self.outbox = senders[0].outbox
        self.schedule = Schedule(range(len(peers)))
        self.givers: dict[int, GivingNode] = {}
        self.direct: list[str] = []  # nodes that could not take from another
        self.lock = threading.Lock()  # of `direct`, which all nodes' threads note

    def run(self) -> list[Sent | OrchestratorError]:
        """Hear what the first nodes lack, to see whether it pays; then serve all."""
        with kept_alive(self.senders):
            fleet.everywhere(self.senders[:WIDTH], lambda sender: sender.lacking or sender.offer())
            lacked = set[int]().union(*(sender.numbers() for sender in self.senders))
            size = sum(self.outbox.tree.entries[number].size for number in lacked)
            if not self.passing_on.pays(len(self.senders), size + len(self.outbox.packed)):
                return fleet.everywhere(self.senders, Sender.go)
            try:
                results = carry_out(self.schedule, self.serve, self.let_give)
            finally:
                self.end_giving()
        if len(self.direct) > 1:
            others = plural(len(self.direct) - 1, "other node")
            self.say(f"files were sent from here to {others}, too: {listed(self.direct[1:])}")
        return [results[at] for at in range(len(self.peers))]

    # -- from node to node -------------------------------------------------------------------

    def let_give(self, nodes: Collection[int]) -> None:
        """Let those nodes listen that others will call."""

        def ask(at: int) -> None:
            token = secrets.token_hex(32)
            request = Give(
                manifest=self.outbox.tree.digest,
                place=self.peers[at].into,
                token=token,
                seconds=LONGEST_SECONDS,
            )
            with self.senders[at].lock:
                port = self.senders[at].channel.ask(request, QUICK_SECONDS).port
            if port:
                self.givers[at] = GivingNode(addresses=(), port=port, token=token)

        fleet.everywhere(sorted(nodes - self.givers.keys()), ask)

    def end_giving(self) -> None:
        for at in self.givers.keys() - self.schedule.given_up:
            with contextlib.suppress(NodeError):  # it is heard by the next question
                self.senders[at].channel.tell(EndGiving())

    def serve(self, order: Order) -> Sent:
        """Let a node have the files from here, or from another node."""
        sender = self.senders[order.taker]
        with sender.lock:
            if order.giver == HEAD:
                return sender.go()
            taken = self.take(order, sender)
        if taken.problem:
            self.note(order, taken.problem)
            raise CannotTake(taken.problem)
        return sender.result

    def take(self, order: Order, sender: Sender) -> Taken:
        """Let a node take the files from another, and follow that to its end."""
        giver = self.givers.get(order.giver)
        if giver is None:
            return Taken(size=0, over=True, problem="it may not listen for others")
        addresses = places(self.peers[order.giver], self.peers[order.taker])
        request = Take(
            manifest=self.outbox.tree.digest,
            size=len(self.outbox.tree.listing),
            into=sender.into,
            giver=giver.replace(addresses=addresses),
            seconds=LONGEST_SECONDS,
        )
        gone = self.schedule.given_up
        taken = take(sender.channel, request, sender.seen, lambda _: order.giver in gone)
        sender.took(taken)
        return taken

    def note(self, order: Order, problem: str) -> None:
        """Say that a node is served from here; of the first with the reason."""
        here, there = self.peers[order.taker].name, self.peers[order.giver].name
        with self.lock:
            self.direct.append(here)
            if len(self.direct) == 1:
                why = problem.encode("ascii", "replace").decode()[:200]
                self.say(f"{here} cannot take files from {there} ({why}): they are sent from here")


def places(giver: Peer, taker: Peer) -> tuple[str, ...]:
    """Return the addresses of one node where another may reach it, the best first."""
    reached = giver.channel.connection.address
    if giver.reached is None or taker.reached is None:
        return (reached,) if reached else ()
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
    """Tell whether no other machine has this address, too."""
    alone = address.ip.is_loopback or address.ip.is_link_local
    return not alone and not address.interface.startswith(OWN_BRIDGES)
