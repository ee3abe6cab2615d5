"""Writes a job's events on one node, and rings for the servers that read them there."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
from collections.abc import Callable, Sequence

from orchestrator.common import hiding
from orchestrator.node.job.run_directory import SystemLog
from orchestrator.node.peers.peers import EventLoop
from orchestrator.protocol import control, events
from orchestrator.protocol.control import HeadNews
from orchestrator.protocol.events import EndOrder, Event
from orchestrator.protocol.message import Nonsense

ROOM_BYTES = 1 << 18  # a job's last word must find room when its log has filled the disk
# The fields of an event that its line in the supervisor's own log has.
LOGGED = ("rank", "pid", "code", "agent", "name", "how", "why")


class EventFile:
    """A job's events.jsonl, with room reserved on the disk."""

    def __init__(self, path: str, secrets: Sequence[str], system: SystemLog) -> None:
        self.secrets, self.system = secrets, system
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # FALLOC_FL_KEEP_SIZE, which os.posix_fallocate() lacks
        ctypes.CDLL(None).fallocate(self.fd, 1, ctypes.c_int64(0), ctypes.c_int64(ROOM_BYTES))
        self.unwritten = b""  # what a full disk refused

    def write(self, event: Event) -> None:
        data = hiding.hide(events.to_data(event), self.secrets)
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
    """The servers that are connected to a supervisor, and what they ask of it."""

    def __init__(
        self,
        loop: EventLoop,
        system: SystemLog,
        hear: Callable[[EndOrder | HeadNews], None],
    ) -> None:
        self.loop, self.system, self.hear = loop, system, hear
        self.connections: list[socket.socket] = []

    def listen(self, server: socket.socket) -> None:
        server.setblocking(False)
        self.loop.watch(server.fileno(), lambda: self.accept(server))

    def accept(self, server: socket.socket) -> None:
        try:
            listener, _ = server.accept()
        except OSError:  # it left again, or too many files are open
            return
        self.system.line("a server connects")
        listener.setblocking(False)
        self.connections.append(listener)
        self.loop.watch(listener.fileno(), lambda: self.read(listener))
        with contextlib.suppress(OSError):  # it may have looked at the files before it was known
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
        for line in data.splitlines():  # requests are single short lines, sent whole
            with contextlib.suppress(Nonsense):
                self.hear(control.from_line(line))

    def ring(self) -> None:
        """Tell all listeners that there is something new in the files."""
        for listener in self.connections:
            with contextlib.suppress(OSError):  # full: a bell waits already; gone: read() sees it
                listener.send(b"\n")
