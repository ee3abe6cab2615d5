"""Gives the files of a manifest to nodes that prove that they have its token."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from orchestrator.node.peers.peers import listen
from orchestrator.node.peers.signed_connection import Broken
from orchestrator.node.transfer.receive import IncomingFiles
from orchestrator.node.transfer.wire import NodeWire

# With a caller whose disk is slow.
PATIENCE_SECONDS = 60.0
# A caller that waits for a file hears so often that it is still to come.
BEAT_SECONDS = 0.5
PIECE_BYTES = 1 << 18


class Giver:
    """Listens at `port`, which is 0 where that is denied; each caller has a thread."""

    def __init__(self, token: str, files: Callable[[], IncomingFiles], seconds: float) -> None:
        self.token, self.files = token, files
        self.deadline = time.monotonic() + seconds
        self.wires: set[NodeWire] = set()
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
            self.wires.add(wire)
        try:
            wire.greet()
            wire.be_patient(PATIENCE_SECONDS)
            while isinstance(question := wire.receive(), dict):
                for number in question["files"]:
                    self.give(wire, number)
        except (Broken, OSError, ValueError, TypeError, LookupError):
            pass  # The caller has all, or says at its own end what is wrong.
        finally:
            wire.close()
            with self.lock:
                self.wires.discard(wire)

    def give(self, wire: NodeWire, number: int) -> None:
        """Send a file, once it has come here."""
        try:
            while (file := self.files().open(number)) is None:
                wire.send(b"")
                self.files().wait(BEAT_SECONDS)
        except LookupError:
            wire.send({"absent": number})
            return
        with file:
            left = self.files().size(number)
            while left > 0:
                data = file.read(min(left, PIECE_BYTES))
                if not data:
                    raise Broken("a file became shorter")
                wire.send(data)
                left -= len(data)

    def close(self) -> None:
        if self.server is not None:
            with contextlib.suppress(OSError):
                # This wakes the thread that accepts.
                self.server.shutdown(socket.SHUT_RDWR)
            self.server.close()
        with self.lock:
            for wire in self.wires:
                wire.close()
