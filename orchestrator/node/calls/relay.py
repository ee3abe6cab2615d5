"""Passes calls from the head on to this node's ranks, and their answers back.

Every rank of a Pool listens in the run directory (node/calls/serve.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Callable

from orchestrator.node.job import processes
from orchestrator.node.job.run_directory import RunDir, connect, connect_in
from orchestrator.protocol import frames
from orchestrator.protocol.frames import CALL, EVERY_RANK, GONE, INTERRUPT

READ_BYTES = 1 << 18
QUEUE_BYTES = 1 << 23  # that may wait for ranks before the head is not read any more
LOOK_SECONDS = 0.02  # between two looks for a socket that a rank has yet to make

Send = Callable[..., None]


class RankSocket:
    """The connection to one rank."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.splitter = frames.Splitter()
        self.queue: deque[memoryview] = deque()
        self.interrupting = False  # as soon as the queue is empty
        self.pid = processes.peer(connection).pid

    def deliver(self, payload: bytes) -> None:
        part = frames.part(payload)
        if part.rank not in (self.rank, EVERY_RANK):
            return
        self.queue.append(memoryview(part.frame()))
        self.interrupting = self.interrupting or part.kind == INTERRUPT
        with contextlib.suppress(OSError):  # its end is on its way to us
            self.flush()  # at once: with the head, this process may end in a moment

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.queue:
                sent = self.connection.send(self.queue[0])
                self.queue[0] = self.queue[0][sent:]
                if not self.queue[0]:
                    self.queue.popleft()
        if self.interrupting and not self.queue:
            self.interrupting = False
            with contextlib.suppress(ProcessLookupError):  # its end is on its way to us
                os.kill(self.pid, signal.SIGINT)


class Calls:
    """The connections to all ranks of one job on this node."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        spec = run.read_spec()
        self.awaited = {spec.first_rank + local: local for local in range(spec.nproc)}
        self.ranks: dict[int, RankSocket] = {}  # by file descriptor
        self.early: list[bytes] = []  # came before a rank listens
        self.supervisor: socket.socket | None = None
        with contextlib.suppress(OSError):  # it has ended
            self.supervisor = connect(run)
            self.supervisor.setblocking(False)

    @property
    def waits(self) -> float | None:
        """Return the seconds until something has to be looked for, or None."""
        return LOOK_SECONDS if self.awaited else None

    @property
    def is_full(self) -> bool:
        waiting = (len(part) for rank in self.ranks.values() for part in rank.queue)
        return sum(waiting) > QUEUE_BYTES

    def connect(self, send: Send) -> None:
        """Connect to the ranks that listen by now; none will if the job is over."""
        for rank, local in list(self.awaited.items()):
            connection = connect_to(self.run.path, local)
            if connection is not None:
                del self.awaited[rank]
                self.ranks[connection.fileno()] = new = RankSocket(rank, connection)
                for payload in self.early:
                    new.deliver(payload)
            elif self.supervisor is None:
                del self.awaited[rank]
                send(CALL, frames.PART.pack(rank, 0, GONE, False), b"its job is over")

    def register(self, poll: select.poll, *, reading: bool) -> None:
        if self.supervisor is not None:
            poll.register(self.supervisor, select.POLLIN)
        for fd, rank in self.ranks.items():
            poll.register(fd, (select.POLLIN * reading) | (select.POLLOUT * bool(rank.queue)))

    def deliver(self, payload: bytes) -> None:
        """Pass a part on to its rank, or to every rank here."""
        for rank in self.ranks.values():
            rank.deliver(payload)
        if self.awaited:
            self.early.append(payload)

    def serve(self, fd: int, send: Send) -> None:
        """Read from a rank, and write what waits for it."""
        if self.supervisor is not None and fd == self.supervisor.fileno():
            self.hear_supervisor()
        rank = self.ranks.get(fd)
        if rank is None:
            return
        try:
            rank.flush()
            data = rank.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            del self.ranks[fd]
            rank.connection.close()
            send(CALL, frames.PART.pack(rank.rank, 0, GONE, False), b"its process ended")
        for kind, payload in rank.splitter.feed(data):
            if kind == CALL and frames.part(payload).rank == rank.rank:
                send(CALL, payload)

    def hear_supervisor(self) -> None:
        """Drain the bell of the log; its end is the supervisor's."""
        assert self.supervisor is not None
        with contextlib.suppress(OSError):
            if self.supervisor.recv(READ_BYTES):
                return
        self.supervisor.close()
        self.supervisor = None


def connect_to(run: str, local_rank: int) -> socket.socket | None:
    """Connect to a rank's socket; None as long as there is none."""
    try:
        client = connect_in(run, f"calls_{local_rank}")
    except OSError:
        return None
    client.setblocking(False)
    return client
