"""When is the job over for this node? What its supervisor hears of the others, and of heads.

An end on one node is passed on to all, whether a head is there or not. A node that hears nothing
of node 0 for as long as its lease lasts ends its part by itself: it may be the last one left.
"""

from __future__ import annotations

import socket
import time
from typing import Any, Protocol

from orchestrator.node.peers.peers import Hub, Message, Peers, Spoke
from orchestrator.node.peers.peers import Loop as PeersLoop

BEAT = 1.0
BEATS = 10  # in a lease, at least
SHORTEST = 1.0  # seconds; a shorter one would end jobs for a busy processor
HEARSAY = 0.3  # what fails here by itself in this time says so, before it is ended for another
PEER_GRACE = 0.5  # after a failure elsewhere nothing can go on: time enough to print why


class Job(PeersLoop, Protocol):
    """What of the supervisor is needed here."""

    def ask(self, why: str, grace: float, **mark: Any) -> None: ...

    def event(self, kind: str, **fields: Any) -> None: ...


class Lease:
    def __init__(self, job: Job, spec: dict[str, Any]) -> None:
        words = spec.get("lease") or {"seconds": BEAT * BEATS, "head": "continue", "port": 0}
        self.job, self.node = job, int(spec["node"])
        self.seconds = max(float(words["seconds"]), SHORTEST)
        self.beat = min(BEAT, self.seconds / BEATS)
        self.waits = bool(words.get("wait"))
        self.needs_head = words["head"] == "stop"
        self.grace = float(words.get("grace", 0.0))
        self.here: set[int] = set()  # the heads' connections
        self.told: dict[int, bool] = {}  # other node -> is there a head, as it says
        self.attached_at = 0.0  # the last time that a head came, or left on purpose, by its clock
        self.left_at = -1.0 if words.get("attached", True) else 0.0
        self.head_at = self.turned = time.monotonic()
        self.end: Message = {}
        self.due = float("inf")  # when an end that others told is to be one here
        self.next_beat = 0.0
        self.said = False
        self.peers = self.find_peers(spec, words) if words["port"] else None

    def find_peers(self, spec: dict[str, Any], words: dict[str, Any]) -> Peers | None:
        token = words["token"]
        if self.node:
            place = (words["address"], words["port"])
            return Spoke(self.job, token, self.hear, place)
        if words.get("fd") is None:
            return None
        server = socket.socket(fileno=words["fd"])
        server.set_inheritable(False)
        return Hub(self.job, token, self.hear, server, spec["nnodes"])

    # -- time --------------------------------------------------------------------------------

    def turn(self) -> float:
        """Whatever is due; seconds until something is. After what came has been read."""
        if self.peers is None and not self.needs_head:
            return 60.0
        now = time.monotonic()
        self.forgive(now - self.turned - 2 * self.beat)
        self.turned = now
        if now >= self.next_beat:
            self.next_beat = now + self.beat
            self.speak(now)
            if not self.end:
                self.judge_peers(now)
                self.judge_heads(now)
        if now >= self.due:
            self.due = float("inf")
            self.job.ask(**self.end)
        return max(0.0, min(self.next_beat, self.due) - time.monotonic())

    def forgive(self, stood_still: float) -> None:
        if stood_still > 0:
            self.head_at += stood_still
            if self.peers is not None:
                self.peers.shift(stood_still)

    def speak(self, now: float) -> None:
        if self.peers is None:
            return
        self.peers.tick(now, self.beat, self.word())
        if isinstance(self.peers, Spoke) and not self.said:
            peer = self.peers
            self.said = bool(peer.heard) or peer.over or peer.late(now)
            if self.said:
                self.job.event("lease", active=not peer.late(now), why=peer.trouble)

    # -- the others --------------------------------------------------------------------------

    def hear(self, node: int, message: Message) -> None:
        self.told[node], attached_at, left_at = message["head"]
        self.attached_at = max(self.attached_at, attached_at)
        self.left_at = max(self.left_at, left_at)
        if "end" in message and self.hurries(message["end"]["grace"]):
            end = message["end"]
            self.pass_on(**end, but=node)
            self.due = min(self.due, time.monotonic() + (HEARSAY if end.get("failed") else 0.0))
        if message.get("done"):
            assert self.peers is not None
            del self.told[node]
            self.peers.leave(node)

    def hurries(self, grace: float) -> bool:
        return not self.end or grace < float(self.end["grace"])

    def pass_on(self, why: str, grace: float, but: int = -1, **mark: Any) -> None:
        """The first end, or one that hurries more, is told to all; later beats repeat it."""
        if not self.hurries(grace):
            return
        self.end = {"why": why, "grace": grace, **mark}
        if self.peers is not None:
            self.peers.send(self.word(), but)

    def judge_peers(self, now: float) -> None:
        peers = self.peers
        if isinstance(peers, Spoke) and self.waits:
            # Only a node 0 that is there and knows nothing of the job shows that it is over.
            if peers.refused_since and now - peers.refused_since > self.seconds and peers.heard:
                self.lose(self.node, "node 0 has left the job", now - peers.refused_since)
            return
        for node, at in peers.heard.items() if peers and not self.waits else ():
            if now - at > self.seconds:
                gone = f"no word between node {node or self.node} and node 0 for {now - at:.0f} s"
                self.lose(node or self.node, gone, now - at)
                return

    def lose(self, node: int, why: str, silent: float) -> None:
        self.job.ask(why, PEER_GRACE, lost=node, silent=silent)

    def goodbye(self) -> None:
        if self.peers is not None:
            self.peers.goodbye({**self.word(), "done": True})

    def word(self) -> Message:
        """What every message says: it may be the first that arrives on a new connection."""
        end = {"end": self.end} if self.end else {}
        return {"node": self.node, "head": self.heads(), **end}

    # -- heads -------------------------------------------------------------------------------

    def head_says(self, connection: int, word: str, at: float) -> None:
        """A head attached ("here"), or left on purpose ("left"), at a time of its own clock."""
        if word == "here":
            self.here.add(connection)
            self.attached_at = max(self.attached_at, at)
        else:
            self.here.discard(connection)
            self.left_at = max(self.left_at, at)

    def head_hung_up(self, connection: int) -> None:
        self.here.discard(connection)

    def heads(self) -> list[Any]:
        """What the others should know. Node 0 knows it of all, and tells all."""
        wires = self.peers.wires if self.peers and not self.node else {}
        here = bool(self.here) or any(self.told.get(node) for node in wires)
        return [here, self.attached_at, self.left_at]

    def judge_heads(self, now: float) -> None:
        here = self.heads()[0] or (self.node and self.told.get(0))
        if here or self.left_at >= self.attached_at:
            self.head_at = now
        elif self.needs_head and now - self.head_at > self.seconds:
            why = f"no head was attached for {now - self.head_at:.0f} s (--on-head-loss stop)"
            self.job.ask(why, self.grace, headless=True)
