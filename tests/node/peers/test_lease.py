"""A node declares its job's head lost at the right time with any clock of the head."""

import math
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from orchestrator.node.peers import lease as leases
from orchestrator.node.peers import peers
from orchestrator.node.peers.lease import Lease
from orchestrator.node.peers.peers import Hub, Spoke
from orchestrator.protocol.control import PeerHeartbeat
from orchestrator.protocol.events import EndOrder, Event, LeaseFormed
from orchestrator.protocol.timing import (
    GONE_SECONDS,
    HEARSAY_SECONDS,
    PEER_BEAT,
    START_PATIENCE_SECONDS,
    UNFOLLOWED_SECONDS,
)
from tests.node.running import bare_spec


class Supervisor:
    """Notes what the lease asks for."""

    def __init__(self) -> None:
        self.orders: list[EndOrder] = []
        self.events: list[Event] = []
        self.watched: dict[int, Callable[[], Any]] = {}

    def ask(self, order: EndOrder) -> None:
        self.orders.append(order)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def watch(self, fd: int, then: Any) -> None:
        self.watched[fd] = then

    def unwatch(self, fd: int) -> None:
        del self.watched[fd]


@pytest.mark.parametrize(("grace", "ahead"), [(30.0, 30.0), (500.0, 100.0), (0.0, 0.0)])
def test_time_limit_leaves_grace(
    monkeypatch: pytest.MonkeyPatch, grace: float, ahead: float
) -> None:
    now = 1000.0
    monkeypatch.setattr(leases.time, "monotonic", lambda: now)
    supervisor = Supervisor()
    lease = Lease(supervisor, bare_spec(limit=200.0, grace=grace, attached=True))
    lease.followed = True
    while now < 1200.0 - ahead:
        assert not supervisor.orders
        now += max(0.001, lease.turn())
    lease.turn()
    assert 1200.0 - ahead <= now < 1201.0 - ahead
    assert [(order.why, order.grace) for order in supervisor.orders] == [
        ("its time limit of 3 min 20 s is over (--time-limit)", grace)
    ]


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("what", ["no head came", "detached", "followed"])
def test_unfollowed_part_without_peers_ends(
    monkeypatch: pytest.MonkeyPatch, node: int, what: str
) -> None:
    """The link to it was cut while it started: its head counts the job as not started."""
    now = 1000.0
    monkeypatch.setattr(leases.time, "monotonic", lambda: now)
    supervisor = Supervisor()
    nowhere = {"supervisors": "127.0.0.1", "supervisors_port": 1} if node else {}
    terms = {"token": "00", "lease_seconds": 3600.0, "attached": what != "detached", **nowhere}
    lease = Lease(supervisor, bare_spec(node=node, **terms))
    if what == "followed":
        lease.followed = True
    until = now + START_PATIENCE_SECONDS + UNFOLLOWED_SECONDS
    for late in (-2.0, 2.0):
        assert not supervisor.orders
        while now < until + late:
            now += lease.beat
            lease.turn()
        supervisor.orders = supervisor.orders[:1]
    assert [order.headless for order in supervisor.orders] == [True] * (what == "no head came")
    if lease.peers is not None:
        for wire in list(lease.peers.wires.values()):
            wire.close()


@pytest.mark.parametrize(("certain", "waits"), [(False, HEARSAY_SECONDS), (True, 0.0)])
def test_uncertain_cause_waits_for_other_reports(certain: bool, waits: float) -> None:
    order = EndOrder(why="rank 3 failed", grace=0.5, failed=True, certain=certain)
    with pytest.MonkeyPatch.context() as patch:
        now = 1000.0
        patch.setattr(leases.time, "monotonic", lambda: now)
        supervisor = Supervisor()
        master = {"supervisors": "127.0.0.1", "supervisors_port": 1, "token": "00"}
        lease = Lease(supervisor, bare_spec(node=1, attached=True, **master))
        # No peer is there to call.
        lease.next_beat = math.inf
        lease.hear(0, PeerHeartbeat(node=0, followed=True, end=order))
        if waits:
            now += waits - 0.001
            lease.turn()
            assert not supervisor.orders
        now += 0.001
        lease.turn()
        assert supervisor.orders == [order]


# -- a supervisor that is gone, and one that is cut off ------------------------------------------


def test_hub_accepts_all_nodes_at_once() -> None:
    loop = Supervisor()
    with socket.create_server(("127.0.0.1", 0), backlog=300) as server:
        hub = Hub(loop, "00" * 16, lambda *_: None, server, nnodes=200)
        calls = [socket.create_connection(server.getsockname()) for _ in range(200)]
        for call in calls:
            with call:
                hub.accept()
        assert len(hub.strangers) == 200
        for wire in list(hub.strangers):
            hub.turn_away(wire)


def test_late_supervisor_is_not_taken_for_firewall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others of a restart may wait for torch, where a spare had it ready."""
    loop, now = Supervisor(), time.monotonic()
    for module in (leases, peers):
        monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        master = {"supervisors": "127.0.0.1", "supervisors_port": port, "token": "00" * 16}
        lease = Lease(loop, bare_spec(node=1, nnodes=2, attached=True, **master))
        for _ in range(round(3 * peers.PEER_DIAL_SECONDS / lease.beat)):
            lease.turn()
            now += lease.beat
        assert not loop.events
    for _ in range(round(2 * peers.PEER_DIAL_SECONDS / lease.beat)):
        lease.turn()
        now += lease.beat
    (formed,) = loop.events
    assert isinstance(formed, LeaseFormed) and not formed.active


class Two:
    """Nodes 0 and 1 of a job, connected over TCP; `now` is their clock."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        spec = bare_spec(nnodes=2, attached=True, lease_seconds=60.0).replace(
            supervisors="127.0.0.1", supervisors_port=port, token="00" * 16
        )
        self.jobs = [Supervisor(), Supervisor()]
        self.leases = [
            Lease(self.jobs[0], spec.replace(listener=listener.detach())),
            Lease(self.jobs[1], spec.replace(node=1)),
        ]
        self.hub, self.spoke = self.leases[0].peers, self.leases[1].peers

    def pass_time(self, seconds: float) -> None:
        """Run the due actions of both leases, and read the messages."""
        until = self.now + seconds
        while self.now < until:
            self.now += PEER_BEAT
            for lease in self.leases:
                lease.turn()
            while self.read():
                pass

    def read(self) -> bool:
        waiting = {fd: then for job in self.jobs for fd, then in job.watched.items()}
        readable, _, _ = select.select(waiting, [], [], 0.05)
        for fd in readable:
            if any(job.watched.get(fd) is waiting[fd] for job in self.jobs):
                waiting[fd]()
        return bool(readable)

    def die(self, node: int) -> None:
        """Close what the kernel closes when a process is killed."""
        lost = self.leases.pop(node).peers
        assert lost is not None
        for wire in lost.wires.values():
            wire.close()
        if isinstance(lost, Hub):
            lost.server.close()
        self.jobs.pop(node)

    def close(self) -> None:
        while self.leases:
            self.die(0)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    two = Two()
    for module in (leases, peers):
        monkeypatch.setattr(module.time, "monotonic", lambda: two.now)
    two.pass_time(3)
    assert two.hub is not None and two.hub.heard and two.spoke is not None and two.spoke.heard
    yield two
    two.close()


@pytest.mark.parametrize("node", [0, 1])
def test_lost_supervisor_is_named_before_lease_ends(two: Two, node: int) -> None:
    two.die(node)
    two.pass_time(GONE_SECONDS - PEER_BEAT)
    assert not two.jobs[0].orders, "it could call again"
    two.pass_time(3 * PEER_BEAT)
    (order,) = two.jobs[0].orders[:1]
    assert order.lost == node and order.gone
    assert order.why.startswith(f"node {node}'s supervisor has ended: its line to node {1 - node}")


def test_reset_line_is_reopened_without_loss(two: Two) -> None:
    assert isinstance(two.hub, Hub)
    two.hub.wires[1].connection.shutdown(socket.SHUT_RDWR)
    two.pass_time(4 * GONE_SECONDS)
    assert not two.jobs[0].orders and not two.jobs[1].orders
    assert not two.hub.closed and two.spoke is not None and not two.spoke.closed


def test_cut_off_node_is_not_taken_for_gone(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls again while the line is silent, and closes the silent one only for another."""
    assert isinstance(two.hub, Hub) and isinstance(two.spoke, Spoke)
    before = two.hub.wires[1]
    with cut(two, monkeypatch):
        two.pass_time(GONE_SECONDS * 4)
        assert two.spoke.silent and not two.hub.closed
    assert not two.jobs[0].orders and not two.jobs[1].orders
    two.pass_time(5)
    assert two.hub.wires[1] is not before and not two.spoke.silent
    two.pass_time(GONE_SECONDS * 2)
    assert not two.jobs[0].orders and not two.hub.closed and not two.spoke.closed


def test_line_to_late_peer_is_kept(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy node 0 hears, and takes each new line in the place of the one before; it says nothing.

    If one of these lines was closed, and another one came late, node 1 would be gone for it.
    """
    assert isinstance(two.hub, Hub) and isinstance(two.spoke, Spoke)
    ended: list[int] = []
    lost_line = Hub.lost_line

    def lost(hub: Hub, node: int, reason: Exception) -> None:
        ended.append(node)
        lost_line(hub, node, reason)

    with monkeypatch.context() as patch:
        patch.setattr(Hub, "lost_line", lost)
        patch.setattr(Hub, "tick", lambda *_: None)
        two.pass_time(3 * GONE_SECONDS)
        assert not ended
        assert len(two.spoke.silent) > 1
    two.pass_time(3)
    assert not two.spoke.silent
    assert not any(job.orders for job in two.jobs)


def test_suspended_supervisor_counts_no_silence(two: Two) -> None:
    two.now += 600.0  # both
    two.pass_time(PEER_BEAT)
    assert not two.jobs[0].orders and not two.jobs[1].orders
    assert [round(lease.stood_still) for lease in two.leases] == [599, 599]
    two.leases[0].wake(two.now + 700.0)  # it ends by what it reads then
    assert round(two.leases[0].stood_still) == 698
    alone = Lease(Supervisor(), bare_spec())
    alone.turn()
    alone.wake(two.now + 60.0)
    assert not alone.stood_still, "it hears no peer, and has nothing to do for a minute"


@contextmanager
def cut(two: Two, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drop all bytes between the two; a caller gets no answer."""
    quiet, other = socket.create_server(("127.0.0.1", 0)), two.spoke
    assert isinstance(other, Spoke)
    with monkeypatch.context() as patch, quiet:
        patch.setattr(peers.SignedConnection, "flush", lambda _: None)
        there, other.address = other.address, quiet.getsockname()
        yield
        other.address = there
