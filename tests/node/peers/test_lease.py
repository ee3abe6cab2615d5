"""When a node takes its job's head for lost, whatever the heads' clocks say."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.node.peers import lease as leases
from orchestrator.node.peers.lease import Lease
from orchestrator.protocol.control import HeadNews, PeerWord
from orchestrator.protocol.events import EndOrder, Event
from orchestrator.protocol.spec import LeaseTerms
from orchestrator.protocol.timing import HEARSAY
from tests.node.running import bare_spec

SECONDS = 5.0
# What may happen: a head comes, leaves on purpose or is lost; its clock may say anything.
STEPS = st.lists(
    st.tuples(st.sampled_from(["here", "left", "lost"]), st.floats(0, 2e9)), min_size=1, max_size=12
)


class Supervisor:
    """Notes what the lease asks for."""

    def __init__(self) -> None:
        self.orders: list[EndOrder] = []

    def ask(self, order: EndOrder) -> None:
        self.orders.append(order)

    def event(self, event: Event) -> None:
        pass

    def watch(self, fd: int, then: Any) -> None:
        pass

    def unwatch(self, fd: int) -> None:
        pass


@given(STEPS)
@example([("here", 1.0), ("lost", 0.0), ("here", 0.0), ("left", 0.0)])
@settings(derandomize=True, max_examples=200)
def test_only_a_head_that_did_not_take_its_leave_is_missed(steps: list[tuple[str, float]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        now = 1000.0
        patch.setattr(leases.time, "monotonic", lambda: now)
        terms = LeaseTerms(seconds=SECONDS, head="stop", attached=False)
        supervisor = Supervisor()
        lease = Lease(supervisor, bare_spec().replace(lease=terms))
        connection, last = 0, "left"
        for what, clock in steps:
            if what == "here" and last != "here":  # a job has one head at most
                connection += 1
                lease.head_says(connection, HeadNews(head="here", at=clock))
            elif what == "left" and last == "here":
                lease.head_says(connection, HeadNews(head="left", at=clock))
                lease.head_hung_up(connection)
            elif what == "lost" and last == "here":
                lease.head_hung_up(connection)
            else:
                continue
            last = what
        for _ in range(30):
            now += lease.beat
            lease.turn()
        assert bool(supervisor.orders) is (last == "lost")
        assert all(order.headless for order in supervisor.orders)


@pytest.mark.parametrize(("certain", "waits"), [(False, HEARSAY), (True, 0.0)])
def test_others_may_speak_first_unless_the_cause_is_certain(certain: bool, waits: float) -> None:
    order = EndOrder(why="rank 3 failed", grace=0.5, failed=True, certain=certain)
    with pytest.MonkeyPatch.context() as patch:
        now = 1000.0
        patch.setattr(leases.time, "monotonic", lambda: now)
        supervisor = Supervisor()
        terms = LeaseTerms(address="127.0.0.1", port=1, token="00")
        lease = Lease(supervisor, bare_spec().replace(node=1, lease=terms))
        lease.next_beat = math.inf  # there is nobody to call
        lease.hear(0, PeerWord(node=0, head=(True, 0.0, 0.0), end=order))
        if waits:
            now += waits - 0.001
            lease.turn()
            assert not supervisor.orders
        now += 0.001
        lease.turn()
        assert supervisor.orders == [order]
