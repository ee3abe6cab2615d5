"""Passes on what the head and other nodes say to each other; as it is signed, it can forge none."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections import deque

from orchestrator.node.follow.relay.sealed import Sealed, context
from orchestrator.node.server.visit import Send
from orchestrator.protocol.frames import CARRIED, CARRIED_CHUNK_BYTES, LOAD, WINDOW_BYTES, load
from orchestrator.protocol.requests.follow import Place, Relay, Unreached

TAKEN_BYTES = WINDOW_BYTES // 4  # written to a node before the head hears of it
# The kernel asks a node that is silent for signs of life: it is lost after some seven seconds.
SIGNS_OF_LIFE = (
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (socket.TCP_KEEPIDLE, socket.IPPROTO_TCP, 3),
    (socket.TCP_KEEPINTVL, socket.IPPROTO_TCP, 1),
    (socket.TCP_KEEPCNT, socket.IPPROTO_TCP, 4),
    (socket.TCP_USER_TIMEOUT, socket.IPPROTO_TCP, 7000),
    (socket.TCP_NODELAY, socket.IPPROTO_TCP, 1),
)


class Line:
    """The connection to one node."""

    def __init__(self, node: int, connection: socket.socket, sealed: Sealed) -> None:
        self.node, self.connection, self.sealed = node, connection, sealed
        self.queue: deque[tuple[memoryview, int]] = deque()  # sealed; bytes of the head's in it
        self.said = b""  # by the node, beyond what the head takes
        self.window = WINDOW_BYTES  # that the head still takes
        self.written = 0  # since the head was told last

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.queue:
                rest, size = self.queue[0]
                rest = rest[self.connection.send(rest) :]
                self.queue[0] = (rest, size)
                if not rest:
                    self.written += size
                    self.queue.popleft()

    def pass_on(self, send: Send) -> None:
        """Send the head what the node has said, as far as it takes it."""
        while self.said and self.window > 0:
            size = min(self.window, CARRIED_CHUNK_BYTES)
            piece, self.said = self.said[:size], self.said[size:]
            self.window -= len(piece)
            send(CARRIED, LOAD.pack(self.node, 0, False), piece)

    def tell_written(self, send: Send) -> None:
        if self.written >= TAKEN_BYTES:
            send(CARRIED, LOAD.pack(self.node, self.written, False))
            self.written = 0


class Watched:
    """Files of which those that are ready are wanted, with one file descriptor for all of them."""

    def __init__(self, event: int) -> None:
        self.event = event
        self.epoll = select.epoll()
        self.fd = self.epoll.fileno()
        self.files: set[int] = set()

    def want(self, file: int, wanted: bool) -> None:
        if wanted == (file in self.files):
            return
        if wanted:
            self.files.add(file)
            self.epoll.register(file, self.event)
        else:
            self.files.remove(file)
            self.epoll.unregister(file)

    def ready(self) -> list[int]:
        return [file for file, _ in self.epoll.poll(0)]


class Lines:
    """The connections to all nodes for which this one is the relay."""

    waits: float | None = None
    is_full = False  # no node has more than its window

    def __init__(self) -> None:
        self.lines: dict[int, Line] = {}  # by file descriptor
        self.of_node: dict[int, Line] = {}
        self.read = Watched(select.EPOLLIN)
        self.written = Watched(select.EPOLLOUT)

    def call(self, request: Relay) -> tuple[Unreached, ...]:
        """Connect to nodes, all at once; return those that were not reached."""
        ours = context(request.identity, request.authority, calls=True)
        reached: dict[int, Line] = {}
        failed: dict[int, str] = {}

        def call_one(place: Place) -> None:
            try:
                reached[place.number] = connect(place, ours, request.seconds)
            except OSError as error:
                failed[place.number] = error.strerror or str(error)

        threads = [threading.Thread(target=call_one, args=(place,)) for place in request.places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for node, line in reached.items():
            self.lines[line.connection.fileno()] = self.of_node[node] = line
            self.watch(line)
        return tuple(Unreached(number=node, why=why) for node, why in sorted(failed.items()))

    def connect(self, send: Send) -> None:
        pass

    def register(self, poll: select.poll, *, reading: bool) -> None:
        poll.register(self.written.fd, select.POLLIN)
        if reading:
            poll.register(self.read.fd, select.POLLIN)

    def watch(self, line: Line) -> None:
        """Want to know when a node says something, and takes what waits for it."""
        self.read.want(line.connection.fileno(), line.window > 0)
        self.written.want(line.connection.fileno(), bool(line.queue))

    def deliver(self, payload: bytes, send: Send) -> None:
        """Pass on to a node what the head says."""
        node, taken, over, data = load(payload)
        line = self.of_node.get(node)
        if line is None:
            return  # it has hung up, and the head hears that
        if over:
            self.hang_up(line)
            return
        line.window += taken
        line.pass_on(send)
        if data:
            with contextlib.suppress(OSError):  # its end is on its way to us
                line.queue.append((memoryview(line.sealed.seal(data)), len(data)))
                line.flush()
                line.tell_written(send)
        self.watch(line)

    def serve(self, fd: int, send: Send) -> None:
        """Read from nodes, or write what waits for them."""
        if fd == self.read.fd:
            for file in self.read.ready():
                self.take(self.lines[file], send)
        elif fd == self.written.fd:
            for file in self.written.ready():
                self.give(self.lines[file], send)

    def give(self, line: Line, send: Send) -> None:
        """Write what waits for a node."""
        try:
            line.flush()
        except OSError:
            self.lose(line, send)
        else:
            line.tell_written(send)
            self.watch(line)

    def take(self, line: Line, send: Send) -> None:
        """Read what a node says."""
        try:
            came = line.connection.recv(CARRIED_CHUNK_BYTES)
            line.said += line.sealed.open(came)
        except BlockingIOError:
            return
        except OSError:
            came = b""
        line.pass_on(send)
        if came:
            self.watch(line)
        else:
            self.lose(line, send)

    def lose(self, line: Line, send: Send) -> None:
        self.hang_up(line)
        send(CARRIED, LOAD.pack(line.node, 0, True))

    def hang_up(self, line: Line) -> None:
        for watched in (self.read, self.written):
            watched.want(line.connection.fileno(), wanted=False)
        del self.lines[line.connection.fileno()], self.of_node[line.node]
        line.connection.close()


def connect(place: Place, ours: ssl.SSLContext, seconds: float) -> Line:
    """Connect to a node, at the first of its addresses where it answers and proves itself."""
    error = OSError("no address is known")
    for address in place.addresses:
        try:
            made = socket.create_connection((address, place.port), seconds)
            return agreed(made, Sealed(ours, place.name), place.number, seconds)
        except OSError as failed:
            error = failed
    raise error


def agreed(made: socket.socket, sealed: Sealed, node: int, seconds: float) -> Line:
    """Let both ends of a new connection prove themselves."""
    try:
        sealed.agree(made, time.monotonic() + seconds)
        for option, level, value in SIGNS_OF_LIFE:
            made.setsockopt(level, option, value)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return Line(node, made, sealed)
