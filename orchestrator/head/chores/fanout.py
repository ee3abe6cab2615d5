"""Run a command on many nodes at once, and end it there whatever becomes of this process."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.errors import NodeError, OrchestratorError
from orchestrator.head.chores.numbered_node import NumberedNode
from orchestrator.head.chores.shell_line import GRACE
from orchestrator.head.connect import fleet
from orchestrator.head.connect.transport import Channel, Connection, Transport, notice_loss

PIECE = 1 << 16
PATIENCE = GRACE + 5.0  # seconds in which a node ends what it was asked to end
SILENCE = 30.0  # seconds without an acknowledgement after which a connection is dead
TIMED_OUT = 124  # as timeout(1) has it


class Receiver(Protocol):
    """Takes what the program on one node prints, from two threads."""

    def take(self, data: bytes, *, errors: bool) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Input:
    """A file that the program of every node gets as its standard input."""

    descriptor: int
    offset: int
    size: int


@dataclass(frozen=True)
class Outcome:
    """How the command ended on one node."""

    node: NumberedNode
    code: int | None = None  # None where it has none: see `problem`
    seconds: float = 0.0
    problem: str = ""
    fix: str = ""
    lost: bool = False  # the node could not be reached, or its connection broke


class Visit:
    """One node's part: a connection, and the program at its other end."""

    def __init__(self, node: NumberedNode) -> None:
        self.node = node
        self.connection: Connection | None = None
        self.channel: Channel | None = None
        self.began = 0.0
        self.deadline: float | None = None
        self.why = ""  # why it was ended, if it was
        self.given_up = False
        self.changing = threading.Lock()

    def begin(self, connection: Connection, line: str, wait: float, limit: float | None) -> bool:
        """Start the program, unless its end came first."""
        with self.changing:
            if self.why:
                connection.close()
                return False
            self.connection = connection
            self.channel = connection.run(line, wait)
            self.channel.settimeout(None)
            self.began = time.monotonic()
            self.deadline = None if limit is None else self.began + limit
        return True

    def end(self, why: str) -> None:
        """Ask the supervisor there to end the program: the end of its input tells it."""
        with self.changing:
            if self.why:
                return
            self.why = why
            if self.channel is not None:
                self.deadline = time.monotonic() + PATIENCE
                self.channel.shutdown_write()

    def look(self, now: float) -> None:
        """End it at its deadline, and hang up where it does not end."""
        if self.deadline is None or now < self.deadline:
            return
        if not self.why:
            self.end("timeout")
        elif self.connection is not None and not self.given_up:
            self.given_up = True
            self.deadline = None
            self.connection.close()


class Fanout:
    """The same command on all these nodes."""

    def __init__(
        self,
        ssh: Transport,
        nodes: Sequence[NumberedNode],
        line_of: Callable[[NumberedNode], str],
        receiver_of: Callable[[NumberedNode], Receiver],
        *,
        limit: float | None = None,
        given: Input | None = None,
    ) -> None:
        self.ssh, self.line_of, self.receiver_of = ssh, line_of, receiver_of
        self.limit, self.given = limit, given
        self.visits = [Visit(node) for node in nodes]
        self.orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def end(self, why: str) -> None:
        """End it everywhere; may be called from a signal handler."""
        self.orders.put(why)

    def go(self) -> list[Outcome]:
        """Run it on all nodes, and return in their order how it ended."""
        lines = [self.line_of(visit.node) for visit in self.visits]  # a mistake in it comes first
        watch = threading.Thread(target=self._watch, daemon=True)
        watch.start()
        work = fleet.everywhere(
            list(zip(self.visits, lines, strict=True)), lambda pair: self._visit(*pair)
        )
        self.orders.put(None)
        return [
            Outcome(visit.node, problem=result.what, fix=result.fix, lost=True)
            if isinstance(result, OrchestratorError)
            else result
            for visit, result in zip(self.visits, work, strict=True)
        ]

    def _watch(self) -> None:
        """Carry out orders and deadlines, until all is over."""
        while True:
            deadlines = [visit.deadline for visit in self.visits if visit.deadline is not None]
            wait = 1.0 if self.limit is not None else None  # a deadline may begin meanwhile
            if deadlines:
                wait = max(0.0, min(deadlines) - time.monotonic())
            try:
                why = self.orders.get(timeout=wait)
                if why is None:
                    return
                for visit in self.visits:
                    visit.end(why)
            except queue.Empty:
                for visit in self.visits:
                    visit.look(time.monotonic())

    def _visit(self, visit: Visit, line: str) -> Outcome:
        connection = self.ssh.connect(self.ssh.config.of_node(visit.node.node))
        notice_loss(connection, SILENCE)
        if not visit.begin(connection, line, self.ssh.timeout, self.limit):
            return Outcome(visit.node, problem=f"not started ({visit.why})")
        assert visit.channel is not None
        channel, receiver = visit.channel, self.receiver_of(visit.node)
        complaints = threading.Thread(
            target=receive, args=(channel.recv_stderr, receiver, True), daemon=True
        )
        complaints.start()
        try:
            if self.given is not None:
                feed(channel, self.given)
            receive(channel.recv, receiver, False)
            complaints.join()
            code = channel.recv_exit_status()
            lost = not connection.alive
        finally:
            receiver.close()
            connection.close()
        return outcome_of(visit, code, lost=lost)


def outcome_of(visit: Visit, code: int, *, lost: bool) -> Outcome:
    seconds = time.monotonic() - visit.began
    ended = Outcome(visit.node, code if code >= 0 else None, seconds)
    if visit.given_up:
        look = f"look there: orchestrator ssh {visit.node.index}"
        return Outcome(visit.node, None, seconds, "it does not end, and may still run", look, True)
    if visit.why == "timeout":
        return Outcome(visit.node, TIMED_OUT, seconds, "ended after its time-out")
    if visit.why and code < 0:
        return Outcome(visit.node, None, seconds, f"ended ({visit.why})")
    if code < 0 and lost:
        return Outcome(visit.node, None, seconds, "the connection broke", lost=True)
    if code < 0:
        return Outcome(visit.node, None, seconds, "somebody killed its shell")
    return ended


def receive(read: Callable[[int], bytes], receiver: Receiver, errors: bool) -> None:
    """Hand over what comes, no faster than the receiver takes it, until the stream ends."""
    while True:
        try:
            data = read(PIECE)
        except OSError:
            return
        if not data:
            return
        receiver.take(data, errors=errors)


def feed(channel: Channel, given: Input) -> None:
    """Send a file; a program that is gone already needs none of it."""
    at, end = given.offset, given.offset + given.size
    try:
        while at < end:
            data = os.pread(given.descriptor, min(PIECE, end - at), at)
            if not data:
                raise NodeError("the file on standard input became shorter while it was sent")
            channel.sendall(data)
            at += len(data)
    except OSError:
        return
