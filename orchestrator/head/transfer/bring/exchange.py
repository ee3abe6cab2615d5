"""Bring files from nodes that have them to nodes that lack them, over open channels.

head/transfer/schedule.py decides who gives to whom, and who is asked next where that fails. A node
calls the one that gives, by a token that both have from here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.screen.output import Progress
from orchestrator.head.transfer.bring.partner import Partner
from orchestrator.head.transfer.schedule import HEAD, Order, Rules, Schedule
from orchestrator.protocol.requests.saved import TakeSaved
from orchestrator.protocol.requests.transfer import GivingNode, TakeFiles

LONGEST_SECONDS = 86400.0  # terabytes over a slow line
CALLERS = 8  # that one node gives to at once: it listens to a few more, and hangs up on others
WAIT_SECONDS = 0.2  # between two looks whether anybody still wants it

Stopped = Callable[[], None]  # raises an error when nobody wants it any more


@dataclass(frozen=True, eq=False)
class Bundle:
    """Files that some nodes lack alike, and one node that has them."""

    source: int
    takers: Sequence[int]
    files: frozenset[str]
    place: Callable[[int], str]  # the directory of the files on a node
    request: Callable[[int, GivingNode], TakeFiles | TakeSaved]  # for a taker
    rules: Rules
    through_here: Callable[[int, str], None] | None = None  # the taker, and why it has to be


class Exchange:
    """Brings bundles of files; what a node could not take is in `failed`, with the reason."""

    def __init__(self, partners: Sequence[Partner], progress: Progress, stopped: Stopped) -> None:
        self.partners, self.progress, self.stopped = partners, progress, stopped
        self.giving: dict[tuple[int, Bundle], GivingNode | None] = {}
        self.asking = [threading.Lock() for _ in partners]  # whether they give
        self.callers = [threading.Semaphore(CALLERS) for _ in partners]
        self.taking = [threading.Lock() for _ in partners]  # a node takes from one at a time
        self.failed: dict[int, OrchestratorError] = {}

    def go(self, bundles: Sequence[Bundle]) -> None:
        """Bring all of it; an error that is not a node's ends it."""
        try:
            fleet.everywhere(bundles, self.spread)
        finally:
            self.progress.clear()
            for node in {node for node, _ in self.giving}:
                self.partners[node].end_giving()
            self.giving.clear()
        self.stopped()

    def spread(self, bundle: Bundle) -> None:
        schedule = Schedule(bundle.takers, (bundle.source,), bundle.rules)
        while not schedule.is_over:
            orders = schedule.orders()
            results = fleet.everywhere(orders, lambda order: self.carry_out(bundle, order))
            self.stopped()
            for order, result in zip(orders, results, strict=True):
                if isinstance(result, OrchestratorError):
                    self.failed[order.taker] = result
                    schedule.failed(order.taker)
                else:
                    self.failed.pop(order.taker, None)
                    schedule.took(order.taker)

    def carry_out(self, bundle: Bundle, order: Order) -> None:
        self.wait(order.pause_seconds)
        with self.taking[order.taker]:
            if order.giver == HEAD:
                assert bundle.through_here is not None
                bundle.through_here(order.taker, self.failed[order.taker].what)
                return
            while not self.callers[order.giver].acquire(timeout=WAIT_SECONDS):
                self.stopped()
            try:
                self.take(bundle, order)
            finally:
                self.callers[order.giver].release()

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.stopped()
            time.sleep(WAIT_SECONDS)

    def take(self, bundle: Bundle, order: Order) -> None:
        """Let a node take what it lacks from another; NodeError says why it could not."""
        giver = self.giver(bundle, order.giver)
        if giver is None:
            raise NodeError(f"{self.partners[order.giver].name} may not listen")
        request = bundle.request(order.taker, giver)
        problem = self.partners[order.taker].take(request, self.progress, self.stopped)
        if problem:
            raise NodeError(problem.encode("ascii", "replace").decode()[:300])

    def giver(self, bundle: Bundle, node: int) -> GivingNode | None:
        """Let a node listen that others will call."""
        with self.asking[node]:
            if (node, bundle) not in self.giving:
                directory = bundle.place(node)
                given = self.partners[node].give(directory, bundle.files, LONGEST_SECONDS)
                self.giving[node, bundle] = given
            return self.giving[node, bundle]
