"""The head's end of what a relay carries: a stream for each node behind it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn, TypeVar

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import tasks
from orchestrator.head.connect.channel import NodeChannel, Silent, read_message
from orchestrator.node.follow.relay.signed import Signed
from orchestrator.protocol import frames
from orchestrator.protocol.frames import CARRIED, CARRIED_CHUNK_BYTES, JSON, WINDOW_BYTES, Load
from orchestrator.protocol.requests.request import Answered
from orchestrator.protocol.timing import RELAY_PATIENCE_SECONDS

TAKEN_BYTES = WINDOW_BYTES // 4  # before the relay hears that it may send as many more

T = TypeVar("T")


class RelayedStream:
    """The channel to one node behind a relay."""

    def __init__(self, relay: RelayChannel, node: int, signed: Signed) -> None:
        self.relay, self.node, self.signed = relay, node, signed
        self.changed = tasks.Condition()
        self.came: list[bytes] = []
        self.waiting = 0  # bytes of these
        self.rest = memoryview(b"")
        self.window = WINDOW_BYTES  # that the relay still takes
        self.taken = 0  # since the relay was told last
        self.broken = ""
        self.timeout: float | None = None

    def deliver(self, load: Load) -> None:
        """Take what the relay has brought; it may bring no more than has a place here."""
        with self.changed:
            if load.data:
                self.came.append(load.data)
                self.waiting += len(load.data)
            if self.waiting + self.taken > WINDOW_BYTES:
                raise NodeError("it brings more than was asked for")
            self.window += load.taken
            if load.over:
                self.broken = self.broken or "its relay lost it"
            self.changed.notify_all()

    def break_off(self, why: str) -> None:
        with self.changed:
            self.broken = self.broken or why
            self.changed.notify_all()

    def meet(self, seconds: float) -> None:
        """Prove each other; raise an OSError where the other end is not the node."""
        self.settimeout(seconds)
        self.sendall(b"")
        said = b""
        while not self.signed.proved:
            said += self.signed.open(self._brought())
        self.rest = memoryview(said)

    # -- as any channel --

    def settimeout(self, timeout: float | None, /) -> None:
        self.timeout = timeout

    def recv(self, nbytes: int, /) -> bytes:
        while not self.rest:
            self.rest = memoryview(self.signed.open(self._brought()))
        data, self.rest = self.rest[:nbytes], self.rest[nbytes:]
        return bytes(data)

    def sendall(self, s: bytes, /) -> None:
        self._send(self.signed.seal(s))

    def recv_stderr_ready(self) -> bool:
        return False

    def recv_stderr(self, nbytes: int, /) -> bytes:
        return b""

    def shutdown_write(self) -> None:
        self.close()

    def recv_exit_status(self) -> int:
        return -1

    def close(self) -> None:
        self.break_off("it was closed")
        self.relay.leave(self.node)

    def _brought(self) -> bytes:
        """Wait for what the relay brings next, and let it bring as many bytes more."""
        with self.changed:
            self._wait(lambda: bool(self.came))
            data = b"".join(self.came)  # of many small pieces each alone would be a lot of work
            self.came, self.waiting = [], 0
            self.taken += len(data)
            taken = self.taken if self.taken >= TAKEN_BYTES else 0
            self.taken -= taken  # before the relay hears that, and brings as many more
        if taken:
            self.relay.send(Load(self.node, taken, False, b""))
        return data

    def _send(self, data: bytes) -> None:
        while data:
            if self.window <= 0:
                self.relay.flush()  # the relay takes more once it has what waits here
            with self.changed:
                self._wait(lambda: self.window > 0)
                if self.broken:
                    raise ConnectionResetError(self.broken)
                piece = data[: min(self.window, CARRIED_CHUNK_BYTES)]
                self.window -= len(piece)
            self.relay.send(Load(self.node, 0, False, piece))
            data = data[len(piece) :]

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until something is so, or nothing more comes."""
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        while not ready():
            if self.broken:
                raise ConnectionResetError(self.broken)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("timed out")
            self.changed.wait(left)


class RelayedConnection:
    """A node behind a relay, where a connection of its own is expected."""

    def __init__(self, stream: RelayedStream, address: str) -> None:
        self.stream = stream
        self.address = address

    @property
    def alive(self) -> bool:
        return not self.stream.broken

    def run(self, command: str, timeout: float) -> NoReturn:
        raise NodeError("a relay carries one channel to each node")

    def close(self) -> None:
        self.stream.close()


class RelayChannel:
    """The channel to a relay, and the streams that it carries."""

    def __init__(self, name: str, channel: NodeChannel) -> None:
        self.name = name
        self.channel = channel
        self.streams: dict[int, RelayedStream] = {}
        self.filling = True  # more nodes may come
        self.reading: tasks.Task | None = None
        self.waiting: deque[bytes] = deque()  # frames, for whoever sends
        self.sending = threading.Lock()
        self.counting = threading.Lock()
        self.holding = 0  # of those who send something together

    def full(self) -> None:
        """Know that no more nodes come: the relay goes with the last one."""
        self.filling = False
        self._go_if_unneeded()

    def add(self, node: int, signed: Signed) -> RelayedStream:
        stream = self.streams[node] = RelayedStream(self, node, signed)
        return stream

    def begin(self) -> None:
        """Read what the relay brings, in a task, until it is lost or nobody needs it."""
        self.reading = tasks.RELAYED.start(self.read)

    def read(self) -> None:
        try:
            while True:
                kind, size = self.patiently(self.channel.header)
                data = self.patiently(partial(self.channel.exactly, size))
                if kind == CARRIED:
                    self.deliver(frames.load(data))
                elif kind == JSON and isinstance(message := read_message(data), Answered):
                    self.channel.answer_of(message)
        except NodeError as error:
            self.break_off(error.what)

    def patiently(self, read: Callable[[float, str], T]) -> T:
        """Read until a deadline, as often as it takes while any bytes come.

        Silence is waited for twice: what has come may lie here, where this process was late itself.
        """
        silences = 0
        while True:
            before = len(self.channel.rest)
            deadline = time.monotonic() + RELAY_PATIENCE_SECONDS / 2
            try:
                return read(deadline, f"no word for {RELAY_PATIENCE_SECONDS:.0f} s")
            except Silent:
                silences = 0 if len(self.channel.rest) > before else silences + 1
                if silences == 2:
                    raise

    def deliver(self, load: Load) -> None:
        stream = self.streams.get(load.node)
        if stream is not None:
            stream.deliver(load)

    def break_off(self, why: str) -> None:
        """Let everybody behind this relay know that it is lost, before anything else that waits."""
        behind, self.streams = list(self.streams.values()), {}  # they hang up on nobody any more
        for stream in behind:
            stream.break_off(f"its relay {self.name} is lost: {why}")
        self.channel.connection.close()

    def send(self, load: Load) -> None:
        """Send to the relay; an OSError where it is lost."""
        self.waiting.append(load.frame())
        if not self.holding:
            self.flush()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Send what is sent meanwhile in one piece: each wakes the relay, which costs both more."""
        with self.counting:
            self.holding += 1
        try:
            yield
        finally:
            with self.counting:
                self.holding -= 1
            with contextlib.suppress(OSError):  # who waits for an answer hears that it is lost
                self.flush()

    def flush(self) -> None:
        """Send what waits.

        Whoever comes while another sends leaves that to it: many small loads travel together.
        """
        while self.waiting and self.sending.acquire(blocking=False):
            try:
                self.channel.put_frame(b"".join(self._taken()))
            except NodeError as error:
                self.break_off(error.what)
                why = f"its relay {self.name} is lost: {error.what}"
                raise ConnectionResetError(why) from error
            finally:
                self.sending.release()

    def _taken(self) -> Iterator[bytes]:
        with contextlib.suppress(IndexError):
            while True:
                yield self.waiting.popleft()

    def leave(self, node: int) -> None:
        """Hang up on a node; after the last one, on the relay."""
        if self.streams.pop(node, None) is None:
            return
        with contextlib.suppress(OSError):
            self.send(Load(node, 0, True, b""))
        self._go_if_unneeded()

    def _go_if_unneeded(self) -> None:
        if not self.streams and not self.filling:
            self.channel.close()
            self.channel.connection.close()
