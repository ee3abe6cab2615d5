"""A TCP connection between two nodes, over which one gives files of a manifest to the other.

It carries the frames of protocol/frames.py. Each is signed as the lines between supervisors are
(node/peers/signed_connection.py), by a token that the head gave to both nodes over its own
connections. The calls block, for a thread; `close` ends their waiting.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

from orchestrator.node.peers.signed_connection import Broken, HungUp, Signature
from orchestrator.protocol import frames
from orchestrator.protocol.frames import JSON, PIECE
from orchestrator.protocol.message import parse

SIGNATURE_BYTES = 32
LARGEST_GREETING_BYTES = 64
BUFFER_BYTES = 1 << 18
# Without a byte for so long, the other side or the way to it is lost.
QUIET_SECONDS = 5.0


class NodeWire:
    """One end of a connection between two nodes."""

    def __init__(self, connection: socket.socket, token: str, side: str) -> None:
        """`side` is "hub" at the end that listened, "spoke" at the one that called."""
        self.connection, self.side = connection, side
        self.signature = Signature(token, side)
        self.reader = connection.makefile("rb", BUFFER_BYTES)
        self.be_patient(QUIET_SECONDS)

    def be_patient(self, seconds: float) -> None:
        """Wait for so long for a byte to come or go."""
        self.quiet = seconds
        self.connection.settimeout(seconds)

    def greet(self) -> None:
        """Agree on a key, and prove to each other that both have the token; the caller first."""
        with self._broken():
            self.connection.sendall(self.signature.nonce)
        self.signature.agree(self._read(len(self.signature.nonce)))
        if self.side == "spoke":
            self.send({})
        self.receive(LARGEST_GREETING_BYTES)
        if self.side == "hub":
            self.send({})

    def send(self, message: dict[str, Any] | bytes) -> None:
        """Send a message, or bytes of a file; none tell the taker that they are still to come."""
        kind = PIECE if isinstance(message, bytes) else JSON
        data = message if isinstance(message, bytes) else json.dumps(message).encode("ascii")
        signature = self.signature.sign(data)
        with self._broken():
            self.connection.sendall(
                frames.header(kind, len(signature) + len(data)) + signature + data
            )

    def receive(self, most: int = max(frames.LARGEST.values())) -> dict[str, Any] | bytes:
        """Return the next message, or the next bytes of a file, proved."""
        kind, size = frames.parse_header(self._read(frames.HEADER.size))
        if not SIGNATURE_BYTES <= size <= most or kind not in (JSON, PIECE):
            raise Broken("not one of us")
        signature, data = self._read(SIGNATURE_BYTES), self._read(size - SIGNATURE_BYTES)
        self.signature.prove(signature, data)
        return data if kind == PIECE else parse(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # This wakes the thread that waits here.
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _read(self, size: int) -> bytes:
        with self._broken():
            data: bytes = self.reader.read(size)
        if len(data) < size:
            raise HungUp
        return data

    @contextlib.contextmanager
    def _broken(self) -> Iterator[None]:
        """Raise Broken for an error of the connection."""
        try:
            yield
        except socket.timeout:  # noqa: UP041  before Python 3.10 it is no TimeoutError
            raise Broken(f"silent for {self.quiet:g} s") from None
        except OSError as error:
            raise Broken(os.strerror(error.errno).lower() if error.errno else str(error)) from error
