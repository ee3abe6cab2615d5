"""One run's files on their way to the head: what they hold beyond the offsets it already has.

The link pumps; the supervisor's socket is the bell that says there is something new.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from orchestrator.node.job.run_directory import RunDir, connect

OFFSET = struct.Struct(">Q")
CHUNK = 1 << 18


class Follower:
    """Sends what the files of one run have beyond the offsets the head already holds."""

    def __init__(self, run: RunDir, log: int, ranks: int, events: int) -> None:
        self.run = run
        self.offsets = {b"L": log, b"R": ranks, b"E": events}
        self.files: dict[bytes, int] = {}
        self.behind = True
        self.supervisor: socket.socket | None = None
        self.said_gone = False
        try:
            self.supervisor = connect(run)
            self.supervisor.setblocking(False)
        except OSError:
            pass  # it has ended: what the files hold now is all there will be

    @property
    def bell(self) -> int | None:
        return self.supervisor.fileno() if self.supervisor else None

    def tell(self, request: dict[str, Any]) -> None:
        """To the supervisor. One short line: it fits, or there is no supervisor any more."""
        if self.supervisor is not None:
            with contextlib.suppress(OSError):
                self.supervisor.send(json.dumps(request).encode() + b"\n")

    def drain_bell(self) -> None:
        assert self.supervisor is not None
        try:
            rung = self.supervisor.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            rung = b""
        if not rung:
            self.supervisor.close()
            self.supervisor = None
        self.behind = True

    def pump(self, send: Callable[..., None]) -> None:
        """One chunk of each file. A record of `ranks` is sent before the log bytes it speaks of."""
        if not self.behind:
            return
        alone = self.supervisor is None  # asked first: then the files hold all it wrote
        size = self.size(b"L")
        self.behind = False
        for kind in (b"E", b"R"):
            self.pass_on(kind, self.size(kind), send)
        if not self.behind:
            self.pass_on(b"L", size, send)
        if alone and not self.behind and not self.said_gone:
            self.said_gone = True
            send(b"J", json.dumps({"supervisor_gone": True}).encode())

    def pass_on(self, kind: bytes, size: int, send: Callable[..., None]) -> None:
        offset = self.offsets[kind]
        if offset < size:
            data = os.pread(self.files[kind], min(CHUNK, size - offset), offset)
            send(kind, OFFSET.pack(offset), data)
            self.offsets[kind] += len(data)
        self.behind = self.behind or self.offsets[kind] < size

    def size(self, kind: bytes) -> int:
        if kind not in self.files:
            path = {b"L": self.run.log, b"R": self.run.ranks, b"E": self.run.events}[kind]
            try:
                self.files[kind] = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                return 0
        return os.fstat(self.files[kind]).st_size
