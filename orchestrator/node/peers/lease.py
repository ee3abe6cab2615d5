"""Decides when the job is over for this node, by the messages of other supervisors and heads.

An end on one node is passed on to all, whether a head is there or not. A node that receives nothing
from node 0 for the length of its lease ends its part by itself: it may be the last one left.
"""

from __future__ import annotations

import socket
import time
from typing import Protocol

from orchestrator.node.peers.peers import EventLoop as PeersLoop
from orchestrator.node.peers.peers import Hub, Peers, Spoke
from orchestrator.protocol.control import PeerHeartbeat
from orchestrator.protocol.events import EndOrder, Event, LeaseFormed
from orchestrator.protocol.spec import Spec
from orchestrator.protocol.timing import (
    BEATS_IN_A_LEASE,
    GONE_SECONDS,
    HEARSAY_SECONDS,
    PEER_BEAT,
    SHORTEST_LEASE,
    UNFOLLOWED_SECONDS,
)


class LeasedJob(PeersLoop, Protocol):
    """The part of the supervisor that a lease needs."""

    def ask(self, order: EndOrder) -> None: ...

    def event(self, event: Event) -> None: ...


class Lease:
    """One supervisor's view of the other nodes and of the heads."""

    def __init__(self, job: LeasedJob, spec: Spec) -> None:
        self.job, self.node = job, spec.node
        self.seconds = max(spec.lease_seconds, SHORTEST_LEASE)
        self.beat = min(PEER_BEAT, self.seconds / BEATS_IN_A_LEASE)
        self.grace = spec.grace
        self.unfollowed_seconds = spec.patience + UNFOLLOWED_SECONDS
        self.limit, self.over_at = spec.limit, float("inf")
        # The grace of the ranks is part of the time limit.
        if spec.limit:
            ahead = min(spec.grace, spec.limit / 2)
            self.over_at = time.monotonic() + spec.limit - ahead
        # True once a head has followed the job, here or on another node.
        self.followed = not spec.attached
        self.began = self.turned = time.monotonic()
        # The longest time for which this process itself did not run.
        self.stood_still = 0.0
        # The order to end, once there is one.
        self.order: EndOrder | None = None
        # The time at which an end announced by others is carried out here.
        self.due = float("inf")
        self.next_beat = 0.0
        self.formed = False
        self.peers = self.find_peers(spec) if spec.supervisors_port else None

    def find_peers(self, spec: Spec) -> Peers | None:
        if self.node:
            place = (spec.supervisors, spec.supervisors_port)
            return Spoke(self.job, spec.token, self.hear, place)
        if spec.listener is None:
            return None
        server = socket.socket(fileno=spec.listener)
        server.set_inheritable(False)
        return Hub(self.job, spec.token, self.hear, server, spec.nnodes)

    # -- time --------------------------------------------------------------------------------

    def turn(self) -> float:
        """Run the actions that are due; return the seconds until the next. Call after reading."""
        now = time.monotonic()
        if now >= self.over_at and not self.order:
            # Imported here, as most jobs have no limit.
            from orchestrator.common.text import format_duration

            reason = f"its time limit of {format_duration(self.limit)} is over (--time-limit)"
            self.job.ask(EndOrder(why=reason, grace=self.grace))
        if not self.beats:
            return max(0.0, min(60.0, self.over_at - now)) if not self.order else 60.0
        self.wake(now)
        if now >= self.next_beat:
            self.next_beat = now + self.beat
            self.speak(now)
            if not self.order:
                self.judge_peers(now)
                self.judge_head(now)
        if now >= self.due:
            self.due = float("inf")
            assert self.order is not None
            self.job.ask(self.order)
        over_at = float("inf") if self.order else self.over_at
        return max(0.0, min(self.next_beat, self.due, over_at) - time.monotonic())

    @property
    def beats(self) -> bool:
        """Return True if heartbeats are needed here; else a minute may pass between two turns."""
        return self.peers is not None or self.is_unfollowed

    def wake(self, now: float) -> None:
        """Exclude time for which this process itself did not run from the silence of others."""
        stood_still = now - self.turned - 2 * self.beat
        self.turned = now
        if stood_still > 0 and self.beats:
            self.stood_still = max(self.stood_still, stood_still)
            self.began += stood_still
            if self.peers is not None:
                self.peers.shift(stood_still)

    def speak(self, now: float) -> None:
        if self.peers is None:
            return
        self.peers.tick(now, self.beat, self.word())
        if isinstance(self.peers, Spoke) and not self.formed:
            peer = self.peers
            self.formed = bool(peer.heard) or peer.over or peer.late(now)
            if self.formed:
                active, reason = not peer.late(now), peer.trouble
                self.job.event(LeaseFormed(time=time.time(), active=active, why=reason))

    # -- the others --------------------------------------------------------------------------

    def hear(self, node: int, word: PeerHeartbeat) -> None:
        self.followed = self.followed or word.followed
        if word.end and self.hurries(word.end.grace):
            self.pass_on(word.end, but=node)
            others_speak = word.end.failed and not word.end.certain
            self.due = min(self.due, time.monotonic() + (HEARSAY_SECONDS if others_speak else 0.0))
        if word.done:
            assert self.peers is not None
            self.peers.leave(node)

    def hurries(self, grace: float) -> bool:
        return not self.order or grace < self.order.grace

    def pass_on(self, order: EndOrder, but: int = -1) -> None:
        """Send all others the first end order, or a more urgent one; later heartbeats repeat it."""
        if not self.hurries(order.grace):
            return
        self.order = order
        if self.peers is not None:
            self.peers.send(self.word(), but)

    def judge_peers(self, now: float) -> None:
        peers = self.peers
        if peers is None:
            return
        for node, at in peers.closed.items():
            if now - at > GONE_SECONDS:
                line = f"its line to node {0 if node else self.node} was closed"
                reason = f"node {node}'s supervisor has ended: {line}"
                self.lose(node, reason, now - at, gone=True)
                return
        for node, at in peers.heard.items():
            if now - at > self.seconds:
                gone = f"no word between node {node or self.node} and node 0 for {now - at:.0f} s"
                self.lose(node or self.node, gone, now - at)
                return

    def lose(self, node: int, reason: str, silent: float, *, gone: bool = False) -> None:
        order = EndOrder(why=reason, grace=self.grace, lost=node, silent=silent, gone=gone)
        self.job.ask(order)

    def goodbye(self) -> None:
        if self.peers is not None:
            self.peers.goodbye(self.word().replace(done=True))

    def word(self) -> PeerHeartbeat:
        return PeerHeartbeat(node=self.node, followed=self.followed, end=self.order)

    # -- its head ----------------------------------------------------------------------------

    def judge_head(self, now: float) -> None:
        waited = now - self.began
        if self.is_unfollowed and waited > self.unfollowed_seconds:
            reason = f"no head has followed the job in the {waited:.0f} s since its start"
            self.job.ask(EndOrder(why=reason, grace=0.0, headless=True))

    @property
    def is_unfollowed(self) -> bool:
        """Return True if a head was expected and none has followed the job, on any node.

        A head whose connection breaks while it starts a job gets no answer and gives the job up.
        So a part that has started, and hears of no other head, is unknown to all heads.
        """
        return not self.followed and not (self.peers is not None and self.peers.heard)
