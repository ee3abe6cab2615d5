"""Connects the supervisors of one job: a hub on node 0, a spoke on every other node.

There is no thread: the supervisor's loop calls `tick` at every heartbeat, and its selector calls
the registered callbacks. Messages are only passed on here; lease.py interprets them.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from orchestrator.protocol.control import PeerHeartbeat
from orchestrator.protocol.frames import AMONG_NODES, SIGNED, Splitter, frame_header
from orchestrator.protocol.message import Nonsense, decode_value, encode_value, parse_object
from orchestrator.protocol.timing import GOODBYE_SECONDS, PEER_DIAL_SECONDS, STRANGER_SECONDS

# The limit of connections that have not yet proved that they belong to this job.
STRANGERS = 64
# After this many heartbeats without a message, another connection is tried.
QUIET_BEATS = 3
DIAL_BEATS = 2
SILENT_LINES = 8

# The arguments are a node and its message.
Hear = Callable[[int, PeerHeartbeat], None]


class EventLoop(Protocol):
    """The part of the supervisor that its connections need."""

    def watch(self, fd: int, then: Callable[[], Any]) -> None: ...

    def unwatch(self, fd: int) -> None: ...


NONCE_BYTES = 16
SIGNATURE_BYTES = 32
# The other end does not read if this much waits.
LARGEST_BACKLOG_BYTES = 1 << 16


class Broken(Exception):
    """The connection is unusable; the text says why."""


class HungUp(Broken):
    """The other side has closed the connection: the process itself, or its kernel when it ended."""

    def __init__(self) -> None:
        super().__init__("it hung up")


CLOSED = (ConnectionResetError, BrokenPipeError)


class SignedConnection:
    """A TCP connection of two supervisors of a job, with signed frames of JSON.

    Each side sends a random number first. The two numbers and the job's token, which only
    supervisors have, form the key that signs every frame. No frame can be forged, replayed or
    reordered, and the token itself is never sent. `side` is "hub" at the end that listened,
    "spoke" at the one that connected.
    """

    def __init__(self, connection: socket.socket, token: str, side: str) -> None:
        self.connection, self.token, self.side = connection, bytes.fromhex(token), side
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.nonce = os.urandom(NONCE_BYTES)
        # The key is set once the other side's number has arrived.
        self.key = b""
        self.signed = self.proved = 0
        # Bytes that the kernel has not accepted yet.
        self.waiting = frame_header(SIGNED, NONCE_BYTES) + self.nonce
        self.early: list[dict[str, Any]] = []
        self.incoming = Splitter(AMONG_NODES)

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        if not self.key:
            self.early.append(message)
            return
        text = json.dumps(message).encode("ascii")
        signed = self.signature(self.side, self.signed, text) + text
        self.waiting += frame_header(SIGNED, len(signed)) + signed
        self.signed += 1
        self.flush()

    def flush(self) -> None:
        try:
            self.waiting = self.waiting[self.connection.send(self.waiting) :]
        except BlockingIOError:
            # The connection is not established yet, or the other end does not read.
            pass
        except CLOSED as error:
            raise HungUp from error
        except OSError as error:
            raise Broken(error.strerror or str(error)) from error
        if len(self.waiting) > LARGEST_BACKLOG_BYTES:
            raise Broken("it does not read")

    def receive(self) -> list[dict[str, Any]]:
        """Return the verified messages received; raise Broken at the end or at an invalid line."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except CLOSED as error:
            raise HungUp from error
        except OSError as error:
            raise Broken(error.strerror or str(error)) from error
        if not data:
            raise HungUp
        return [message for _, signed in self.incoming.feed(data) for message in self._take(signed)]

    def _take(self, signed: bytes) -> list[dict[str, Any]]:
        if not self.key:
            self._agree(signed)
            return []
        said, text = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        other = "spoke" if self.side == "hub" else "hub"
        if not hmac.compare_digest(said, self.signature(other, self.proved, text)):
            # The frame was not signed by the other side, or is out of order.
            raise Broken("not one of us")
        self.proved += 1
        return [parse_object(text)]

    def _agree(self, nonce: bytes) -> None:
        """Derive the key from the token and both sides' random numbers."""
        if len(nonce) != NONCE_BYTES:
            raise Broken("not one of us")
        both = (self.nonce, nonce) if self.side == "hub" else (nonce, self.nonce)
        self.key = hmac.digest(self.token, b"".join(both), "sha256")
        self.flush()
        early, self.early = self.early, []
        for message in early:
            self.send(message)

    def signature(self, side: str, number: int, data: bytes) -> bytes:
        words = b"%s %d " % (side.encode(), number) + data
        # hmac.digest() releases the GIL: with many threads each signature would wait for others.
        return hmac.new(self.key, words, "sha256").digest()

    def close(self) -> None:
        self.connection.close()


class Peers:
    """The nodes at the other ends. `heard` maps each to the time of its last message.

    `closed` maps nodes whose end was closed to the time of that. A living node never does this, as
    it keeps a silent connection until another replaces it. A network failure closes none.
    """

    def __init__(self, loop: EventLoop, token: str, hear: Hear) -> None:
        self.loop, self.token, self.hear = loop, token, hear
        self.wires: dict[int, SignedConnection] = {}
        self.heard: dict[int, float] = {}
        self.closed: dict[int, float] = {}

    def tick(self, now: float, beat: float, word: PeerHeartbeat) -> None:
        raise NotImplementedError

    def send(self, word: PeerHeartbeat, but: int = -1) -> None:
        for node, wire in list(self.wires.items()):
            if node != but:
                try:
                    wire.send(encode_value(word))
                except Broken as why:
                    self.lost_line(node, why)

    def lost_line(self, node: int, reason: Exception) -> None:
        if isinstance(reason, HungUp) and node in self.heard:
            self.closed.setdefault(node, time.monotonic())
        self.drop(node, str(reason))

    def drop(self, node: int, reason: str) -> None:
        self.forget(self.wires.pop(node))

    def lives(self, node: int) -> None:
        """Record that a node is alive."""
        self.heard[node] = time.monotonic()
        self.closed.pop(node, None)

    def forget(self, wire: SignedConnection) -> None:
        self.loop.unwatch(wire.fileno())
        wire.close()

    def leave(self, node: int) -> None:
        """Stop monitoring a node whose part is over."""
        self.heard.pop(node, None)
        self.closed.pop(node, None)
        if node in self.wires:
            self.drop(node, "over")

    def shift(self, seconds: float) -> None:
        """Exclude the time for which this process was stopped from the silence of others."""
        now = time.monotonic()
        self.heard = {node: min(now, at + seconds) for node, at in self.heard.items()}
        self.closed = {node: min(now, at + seconds) for node, at in self.closed.items()}

    def goodbye(self, word: PeerHeartbeat) -> None:
        """Send the last message and let it arrive: closing with unread bytes would discard it."""
        self.send(word)
        wires = [wire.connection for wire in self.wires.values() if wire.key]
        deadline = time.monotonic() + GOODBYE_SECONDS
        for connection in wires:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        for connection in wires:
            # The other end does not close in time.
            with contextlib.suppress(OSError):
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                while connection.recv(1 << 16):
                    continue


class Hub(Peers):
    """Node 0's end: listens, and accepts only connections that prove the token."""

    def __init__(
        self, loop: EventLoop, token: str, hear: Hear, server: socket.socket, nnodes: int
    ) -> None:
        super().__init__(loop, token, hear)
        self.server, self.nnodes = server, nnodes
        self.strangers: dict[SignedConnection, float] = {}
        self.begun = time.monotonic()
        server.setblocking(False)
        loop.watch(server.fileno(), self.accept)

    def accept(self) -> None:
        try:
            connection, _ = self.server.accept()
            wire = SignedConnection(connection, self.token, "hub")
            wire.flush()
        except (OSError, Broken):
            # The caller has disconnected.
            return
        self.strangers[wire] = time.monotonic()
        self.loop.watch(wire.fileno(), lambda: self.read_stranger(wire))
        # All nodes of the job may connect at once.
        if len(self.strangers) > STRANGERS + self.nnodes:
            self.turn_away(next(iter(self.strangers)))

    def turn_away(self, wire: SignedConnection) -> None:
        del self.strangers[wire]
        self.forget(wire)

    def read_stranger(self, wire: SignedConnection) -> None:
        if wire not in self.strangers:
            # It was closed after the selector had reported it.
            return
        try:
            messages = wire.receive()
            node = decode_value(PeerHeartbeat, messages[0], newer=True).node if messages else 0
        except (Broken, Nonsense):
            self.turn_away(wire)
            return
        if not messages:
            return
        del self.strangers[wire]
        if node in self.wires:
            self.drop(node, "it called again")
        self.wires[node] = wire
        self.loop.unwatch(wire.fileno())
        self.loop.watch(wire.fileno(), lambda: self.read(node, wire))
        self.take(node, messages)

    def read(self, node: int, wire: SignedConnection) -> None:
        try:
            self.take(node, wire.receive())
        except (Broken, ValueError) as why:
            if self.wires.get(node) is wire:
                self.lost_line(node, why)

    def take(self, node: int, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            self.lives(node)
            self.hear(node, decode_value(PeerHeartbeat, message, newer=True))

    def tick(self, now: float, beat: float, word: PeerHeartbeat) -> None:
        for wire, since in list(self.strangers.items()):
            if now - since > STRANGER_SECONDS:
                self.turn_away(wire)
        self.send(word)


class Spoke(Peers):
    """Any other node's end: keeps one connection to node 0, and reconnects when it is silent.

    A silent connection on which node 0 has sent anything, even only its number, stays open until
    another one is answered: node 0 may use it, and would take its close for this node's end.
    """

    def __init__(self, loop: EventLoop, token: str, hear: Hear, address: tuple[str, int]) -> None:
        super().__init__(loop, token, hear)
        self.address = address
        self.silent: list[SignedConnection] = []
        # The time of the last message on this connection, or of the connection attempt.
        self.word_at = 0.0
        self.proved = False
        self.over = False
        self.trouble = ""
        self.begun = time.monotonic()

    def tick(self, now: float, beat: float, word: PeerHeartbeat) -> None:
        patience = beat * (QUIET_BEATS if self.proved else DIAL_BEATS)
        if self.wires and now - self.word_at > patience:
            self.set_aside()
        if not self.wires and not self.over:
            self.dial()
        self.send(word)

    def set_aside(self) -> None:
        wire = self.wires[0]
        if not self.proved:
            with contextlib.suppress(OSError):
                # This succeeds if connected: then node 0's supervisor has not started yet.
                wire.connection.getpeername()
                self.begun = time.monotonic()
        if not wire.key:
            self.drop(0, "no answer")
            return
        self.loop.unwatch(self.wires.pop(0).fileno())
        self.trouble, self.proved = "no answer", False
        self.silent.append(wire)
        # Node 0 has replaced the oldest by later connections.
        if len(self.silent) > SILENT_LINES:
            self.silent.pop(0).close()

    def late(self, now: float) -> bool:
        return now - self.begun > PEER_DIAL_SECONDS

    def dial(self) -> None:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                *self.address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            connection = socket.socket(family, kind, protocol)
        except OSError as error:
            self.trouble = error.strerror or str(error)
            return
        wire = SignedConnection(connection, self.token, "spoke")
        self.proved, self.word_at = False, time.monotonic()
        self.wires[0] = wire
        self.loop.watch(wire.fileno(), lambda: self.read(wire))
        failed = connection.connect_ex(address)
        # Otherwise the result of the attempt is seen by reading.
        if failed not in (0, errno.EINPROGRESS):
            self.drop(0, os.strerror(failed))

    def read(self, wire: SignedConnection) -> None:
        try:
            messages = wire.receive()
        except (Broken, ValueError) as why:
            if self.wires.get(0) is wire:
                self.lost_line(0, why)
            return
        self.word_at = time.monotonic()
        while messages and self.silent:
            self.silent.pop().close()
        for message in messages:
            self.proved = True
            self.lives(0)
            self.hear(0, decode_value(PeerHeartbeat, message, newer=True))

    def drop(self, node: int, reason: str) -> None:
        super().drop(node, reason)
        self.trouble, self.proved = reason, False

    def leave(self, node: int) -> None:
        self.over = True
        super().leave(node)
