"""Gives the files of a manifest to nodes that prove that they have its token."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import BinaryIO, Protocol

from orchestrator.node.peers.peers import listen
from orchestrator.node.peers.signed_connection import Broken
from orchestrator.node.transfer.wire import NodeWire
from orchestrator.protocol.frames import STREAM_CHUNK_BYTES

# Callers that have not proved yet that they have the token.
MOST_STRANGERS = 64
# With a caller whose disk is slow.
PATIENCE_SECONDS = 60.0
# A caller that waits for a file hears so often that it is still to come.
BEAT_SECONDS = 0.5


class GivenFiles(Protocol):
    """Files that are here, or that come here while others take them."""

    def open(self, number: int) -> BinaryIO | None:
        """Open a file; None for one that is still to come, LookupError for one that never is."""

    def size(self, number: int) -> int:
        """Return how long the file is by its manifest."""

    def wait(self, seconds: float) -> None:
        """Return when more has come, or after some time."""


class Giver:
    """Listens at `port`, which is 0 where that is denied; each caller has a thread."""

    def __init__(self, token: str, files: Callable[[], GivenFiles], seconds: float) -> None:
        self.token, self.files = token, files
        self.deadline = time.monotonic() + seconds
        self.wires: set[NodeWire] = set()
        # In the order in which they came.
        self.strangers: dict[NodeWire, None] = {}
        self.lock = threading.Lock()
        self.server = listen(0)
        self.port: int = self.server.getsockname()[1] if self.server else 0
        if self.server is not None:
            threading.Thread(target=self.accept, args=(self.server,), daemon=True).start()

    def accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # It was closed, or its time is over.
            while (left := self.deadline - time.monotonic()) > 0:
                server.settimeout(left)
                connection, _ = server.accept()
                threading.Thread(target=self.serve, args=(connection,), daemon=True).start()
        self.close()

    def serve(self, connection: socket.socket) -> None:
        """Give one caller the files that it asks for; a stranger gets a random number."""
        wire = NodeWire(connection, self.token, "hub")
        with self.lock:
            self.strangers[wire] = None
            if len(self.strangers) > MOST_STRANGERS:
                oldest = next(iter(self.strangers))
                del self.strangers[oldest]
                oldest.close()
        try:
            wire.greet()
            with self.lock:
                self.strangers.pop(wire, None)
                self.wires.add(wire)
            wire.be_patient(PATIENCE_SECONDS)
            while isinstance(question := wire.receive(), dict):
                for number, offset in question["files"]:
                    self.give(wire, number, offset)
        except (Broken, OSError, ValueError, TypeError, LookupError):
            pass  # The caller has all, or says at its own end what is wrong.
        finally:
            wire.close()
            with self.lock:
                self.strangers.pop(wire, None)
                self.wires.discard(wire)

    def give(self, wire: NodeWire, number: int, offset: int) -> None:
        """Send a file from an offset on, once it has come here."""
        try:
            while (file := self.files().open(number)) is None:
                wire.send_piece(b"")
                self.files().wait(BEAT_SECONDS)
        except LookupError:
            wire.send({"absent": number})
            return
        with file:
            left = self.files().size(number) - file.seek(offset)
            while left > 0:
                data = file.read(min(left, STREAM_CHUNK_BYTES))
                if not data:
                    raise Broken("a file became shorter")
                wire.send_piece(data)
                left -= len(data)

    def close(self) -> None:
        if self.server is not None:
            with contextlib.suppress(OSError):
                # This wakes the thread that accepts.
                self.server.shutdown(socket.SHUT_RDWR)
            self.server.close()
        with self.lock:
            for wire in (*self.wires, *self.strangers):
                wire.close()
