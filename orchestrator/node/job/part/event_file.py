"""Writes a job's events on one node, and notifies the servers that follow them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
from collections.abc import Callable, Sequence

from orchestrator.common import files, hiding
from orchestrator.node.job.run_directory import SystemLog
from orchestrator.node.peers.peers import EventLoop
from orchestrator.protocol import control, events
from orchestrator.protocol.control import HeadState
from orchestrator.protocol.events import EndOrder, Event
from orchestrator.protocol.message import Nonsense

# The reserved space lets the final events be written even if the job's log has filled the disk.
ROOM_BYTES = 1 << 18
# The fields of an event that are written to the supervisor's own log.
LOGGED = ("rank", "pid", "code", "agent", "name", "how", "why")


class EventFile:
    """A job's events.jsonl, with space reserved on the disk."""

    def __init__(self, path: str, secrets: Sequence[str], system: SystemLog) -> None:
        self.secrets, self.system = secrets, system
        self.fd = files.open_to_append(path)
        # os.posix_fallocate() would change the size, as it lacks FALLOC_FL_KEEP_SIZE (1).
        ctypes.CDLL(None).fallocate(self.fd, 1, ctypes.c_int64(0), ctypes.c_int64(ROOM_BYTES))
        # Bytes that could not be written because the disk was full; the next write retries them.
        self.unwritten = b""

    def write(self, event: Event) -> None:
        data = hiding.hide_secrets(events.event_to_data(event), self.secrets)
        fields = (f"{name}={data[name]}" for name in LOGGED if data.get(name) not in (None, ""))
        self.system.line("event %s", " ".join([str(data["event"]), *fields]))
        self.unwritten += json.dumps(data).encode("ascii") + b"\n"
        with contextlib.suppress(OSError):
            while self.unwritten:
                self.unwritten = self.unwritten[os.write(self.fd, self.unwritten) :]

    def release_room(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self.fd, os.fstat(self.fd).st_size)


class Listeners:
    """The servers that are connected to a supervisor, and their requests."""

    def __init__(
        self,
        loop: EventLoop,
        system: SystemLog,
        hear: Callable[[EndOrder | HeadState], None],
    ) -> None:
        self.loop, self.system, self.hear = loop, system, hear
        self.connections: list[socket.socket] = []

    def listen(self, server: socket.socket) -> None:
        server.setblocking(False)
        self.loop.watch(server.fileno(), lambda: self.accept(server))

    def accept(self, server: socket.socket) -> None:
        try:
            listener, _ = server.accept()
        # The client has disconnected, or too many files are open.
        except OSError:
            return
        self.system.line("a server connects")
        listener.setblocking(False)
        self.connections.append(listener)
        self.loop.watch(listener.fileno(), lambda: self.read(listener))
        # The server may have read the files before this connection was registered.
        with contextlib.suppress(OSError):
            listener.send(b"\n")

    def read(self, listener: socket.socket) -> None:
        try:
            data = listener.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.system.line("a server hangs up")
            self.loop.unwatch(listener.fileno())
            self.connections.remove(listener)
            listener.close()
            return
        # Each request is one short line, which arrives in one piece.
        for line in data.splitlines():
            with contextlib.suppress(Nonsense):
                self.hear(control.message_from_line(line))

    def notify_listeners(self) -> None:
        """Send a newline to all listeners: the files have grown."""
        for listener in self.connections:
            # A full socket already holds a notification; read() handles a closed one.
            with contextlib.suppress(OSError):
                listener.send(b"\n")
