"""Gives files to every caller who proves that it has the token, until it is closed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from typing import BinaryIO, Protocol

from orchestrator.node.peers.peers import listen
from orchestrator.node.peers.signed_connection import Broken
from orchestrator.node.transfer.wire import ASK, DATA, LARGEST_BYTES, WAIT, Wire

RECORD = struct.Struct(">?Q")  # is it here; its size from there on: before each file
CALLERS = 16  # at once,
STRANGERS = 64  # and so many more who have not shown yet that they have the token
PROOF_SECONDS = 5.0  # in which a caller shows that it has the token
PATIENCE_SECONDS = 60.0  # with a caller whose disk is slow
SMALL_BYTES = LARGEST_BYTES // 2  # of a file that travels with others
BEAT = 1.0  # who waits for a file hears so often that it is still to come


class Source(Protocol):
    """Opens what can be given, by its name."""

    def open(self, name: str) -> BinaryIO | None:
        """Open a file; None for one that is still to come, LookupError for one that is not ours."""

    def wait(self, seconds: float) -> None:
        """Return when more has come, or after some time."""


class Giver:
    """Listens at `port`, which is 0 where that is denied."""

    def __init__(self, token: str, source: Source, seconds: float) -> None:
        self.token, self.source = token, source
        self.deadline = time.monotonic() + seconds
        self.wires: set[Wire] = set()
        self.strangers: dict[Wire, None] = {}  # the first to come first
        self.lock = threading.Lock()  # of both: each caller has a thread
        self.server = listen(0)
        self.port: int = self.server.getsockname()[1] if self.server else 0
        if self.server is not None:
            threading.Thread(target=self.accept, args=(self.server,), daemon=True).start()

    def accept(self, server: socket.socket) -> None:
        while (left := self.deadline - time.monotonic()) > 0:
            try:
                server.settimeout(left)
                connection, _ = server.accept()
            except OSError:  # closed, or over
                break
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()
        self.close()

    def serve(self, connection: socket.socket) -> None:
        """Give one caller what it asks for; a stranger gets a random number and nothing else."""
        wire = Wire(connection, self.token, "hub", time.monotonic() + PROOF_SECONDS)
        with self.lock:
            self.strangers[wire] = None
            if len(self.strangers) > STRANGERS:
                first = next(iter(self.strangers))
                del self.strangers[first]
                first.close()  # its thread hears that
        try:
            wire.greet()
            asked = wire.receive()
            self.know(wire)
            while asked[0] == ASK:
                self.give(wire, json.loads(asked[1]))
                asked = wire.receive()
        except (Broken, ValueError, TypeError, OSError, OverflowError):
            pass  # it has what it wanted, or will say at its own end what is wrong
        finally:
            wire.close()
            with self.lock:
                self.strangers.pop(wire, None)
                self.wires.discard(wire)

    def know(self, wire: Wire) -> None:
        """Count one that has shown that it has the token among the callers."""
        with self.lock:
            self.strangers.pop(wire, None)
            if len(self.wires) >= CALLERS:
                raise Broken("too many callers")
            self.wires.add(wire)
        wire.deadline = self.deadline
        wire.be_patient(PATIENCE_SECONDS)

    def give(self, wire: Wire, names: list[str]) -> None:
        """Send these files, one after the other, small ones together in a frame."""
        waiting = bytearray()
        for name in names:
            try:
                file = self.await_file(wire, waiting, name)
            except LookupError:
                waiting += RECORD.pack(False, 0)
                continue
            with file:
                start = file.tell()
                size = max(0, file.seek(0, os.SEEK_END) - start)
                file.seek(start)
                waiting += RECORD.pack(True, size)
                if size > SMALL_BYTES:
                    send_file(wire, waiting, file, size)
                else:
                    waiting += (data := file.read(size))
                    if len(data) < size:
                        raise Broken("a file became shorter")
            if len(waiting) >= LARGEST_BYTES - SMALL_BYTES - RECORD.size:
                flush(wire, waiting)
        flush(wire, waiting)

    def await_file(self, wire: Wire, waiting: bytearray, name: str) -> BinaryIO:
        """Wait for a file that is on its own way here; its caller hears that we are there."""
        said = 0.0
        while (file := self.source.open(name)) is None:
            flush(wire, waiting)
            if time.monotonic() - said > BEAT / 2:
                wire.send(WAIT)
                said = time.monotonic()
            self.source.wait(BEAT)
        return file

    def close(self) -> None:
        if self.server is not None:
            with contextlib.suppress(OSError):
                self.server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self.server.close()
        with self.lock:
            for wire in (*self.wires, *self.strangers):
                wire.close()


def flush(wire: Wire, waiting: bytearray) -> None:
    if waiting:
        wire.send(DATA, waiting)
        waiting.clear()


def send_file(wire: Wire, waiting: bytearray, file: BinaryIO, size: int) -> None:
    """Send what waits, and all of a file."""
    while size:
        count = min(size, LARGEST_BYTES - len(waiting))
        wire.send_file(waiting, file, count)
        waiting.clear()
        size -= count
