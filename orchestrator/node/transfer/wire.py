"""A TCP connection between two nodes for the contents of files, which only those two can write.

It is signed as the lines between supervisors are (node/peers/signed_connection.py): by a token that
the head gave to both over its own connections. Of contents the kind and size are signed alone: who
takes them knows their SHA-256. Blocking, for a thread; `close` ends its waiting.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO

from orchestrator.node.peers.signed_connection import Broken, Signature

HEAD = struct.Struct(">cI")  # kind, size of the payload
FRAME = struct.Struct(">cI32s")  # the same, signature
ASK, WAIT = b"A", b"W"
DATA = b"D"  # contents, which the signature does not cover
LARGEST_BYTES = 1 << 18
QUIET_SECONDS = 5.0  # without a byte: the other side, or the way to it, is lost


class Wire:
    """One end of it."""

    def __init__(self, connection: socket.socket, token: str, side: str, deadline: float) -> None:
        self.connection = connection
        self.deadline = deadline  # of all that is sent
        self.signature = Signature(token, side)
        self.data = memoryview(b"")  # of the last frame, as far as nobody took it
        self.be_patient(QUIET_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def be_patient(self, seconds: float) -> None:
        """Wait for so long for a byte to come or go."""
        self.quiet = seconds
        self.connection.settimeout(seconds)

    def greet(self) -> None:
        """Exchange the numbers that make the key."""
        self._write(self.signature.nonce)
        self.signature.agree(bytes(self._read(len(self.signature.nonce))))

    def send(self, kind: bytes, payload: bytes | bytearray = b"") -> None:
        self._write(self._head(kind, len(payload), payload) + payload)

    def send_file(self, before: bytes | bytearray, file: BinaryIO, size: int) -> None:
        """Send the next bytes of a file as DATA behind others; they do not come in here."""
        self._write(self._head(DATA, len(before) + size) + before, socket.MSG_MORE)
        if self._move(partial(self.connection.sendfile, file, file.tell(), size)) < size:
            raise Broken("a file became shorter")

    def _head(self, kind: bytes, size: int, payload: bytes | bytearray = b"") -> bytes:
        head = HEAD.pack(kind, size)
        return head + self.signature.sign(signed(head, payload))

    def receive(self) -> tuple[bytes, bytearray]:
        """Return the next frame, proved."""
        kind, size, signature = FRAME.unpack(self._read(FRAME.size))
        if size > LARGEST_BYTES:
            raise Broken("not one of us")
        payload = self._read(size)
        self.signature.prove(signature, signed(HEAD.pack(kind, size), payload))
        return kind, payload

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Yield the next bytes that the other side gives, as they come."""
        while size:
            while not self.data:
                kind, payload = self.receive()
                if kind not in (DATA, WAIT):
                    raise Broken("not one of us")
                self.data = memoryview(payload)
            piece, self.data = self.data[:size], self.data[size:]
            size -= len(piece)
            yield piece

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits here
        self.connection.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._move(partial(self.connection.recv_into, view))
            if not count:
                raise Broken("it hung up")
            view = view[count:]
        return data

    def _write(self, data: bytes, flags: int = 0) -> None:
        view = memoryview(data)
        while view:
            view = view[self._move(partial(self.connection.send, view, flags)) :]

    def _move(self, move: Callable[[], int]) -> int:
        if time.monotonic() > self.deadline:
            raise Broken("it takes too long")
        try:
            return move()
        except socket.timeout:  # noqa: UP041  before Python 3.10 it is no TimeoutError
            raise Broken(f"silent for {self.quiet:g} s") from None
        except OSError as error:
            raise Broken(os.strerror(error.errno).lower() if error.errno else str(error)) from error


def signed(head: bytes, payload: bytes | bytearray) -> bytes:
    """Return what the signature of a frame covers."""
    return head if head.startswith(DATA) else head + payload
