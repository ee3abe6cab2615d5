"""A TCP connection between two supervisors of a job, for lines of JSON that only they can write.

Each side sends a random number first. The two numbers and the job's token, which supervisors alone
have, make the key that signs every line. Nothing can be forged, replayed or put into another order,
and the token itself never travels.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
from typing import Any

from orchestrator.protocol.message import parse

LONGEST_LINE_BYTES = 4096
LARGEST_BACKLOG_BYTES = 1 << 16  # the other end does not read


class Broken(Exception):
    """The connection is of no use any more; the text says why."""


class HungUp(Broken):
    """The other side has closed it: by itself, or the kernel there, when that process ended."""

    def __init__(self) -> None:
        super().__init__("it hung up")


CLOSED = (ConnectionResetError, BrokenPipeError)


class SignedConnection:
    """One end of it. `side` is "hub" at the end that listened, "spoke" at the one that called."""

    def __init__(self, connection: socket.socket, token: str, side: str) -> None:
        self.connection, self.token, self.side = connection, bytes.fromhex(token), side
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.nonce = os.urandom(16).hex().encode()
        self.key = b""  # until the other side's number is here
        self.signed = self.proved = 0
        self.waiting = self.nonce + b"\n"  # what the kernel has not taken yet
        self.early: list[dict[str, Any]] = []
        self.incoming = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        if not self.key:
            self.early.append(message)
            return
        text = json.dumps(message).encode("ascii")
        self.waiting += self.signature(self.side, self.signed, text) + b" " + text + b"\n"
        self.signed += 1
        self.flush()

    def flush(self) -> None:
        try:
            self.waiting = self.waiting[self.connection.send(self.waiting) :]
        except BlockingIOError:
            pass  # not connected yet, or it does not read
        except CLOSED as error:
            raise HungUp from error
        except OSError as error:
            raise Broken(error.strerror or str(error)) from error
        if len(self.waiting) > LARGEST_BACKLOG_BYTES:
            raise Broken("it does not read")

    def receive(self) -> list[dict[str, Any]]:
        """Return what came, each line proved; raise Broken at the end, or at any other line."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except CLOSED as error:
            raise HungUp from error
        except OSError as error:
            raise Broken(error.strerror or str(error)) from error
        if not data:
            raise HungUp
        *lines, self.incoming = (self.incoming + data).split(b"\n")
        if len(self.incoming) > LONGEST_LINE_BYTES:
            raise Broken("not one of us")
        return [message for line in lines for message in self._take(line)]

    def _take(self, line: bytes) -> list[dict[str, Any]]:
        if not self.key:
            self._agree(line)
            return []
        said, _, text = line.partition(b" ")
        other = "spoke" if self.side == "hub" else "hub"
        if not hmac.compare_digest(said, self.signature(other, self.proved, text)):
            raise Broken("not one of us")  # the other side did not say this, or not now
        self.proved += 1
        return [parse(text)]

    def _agree(self, nonce: bytes) -> None:
        """Make the key, of the token and of a random number of either side."""
        if len(nonce) != len(self.nonce):
            raise Broken("not one of us")
        both = (self.nonce, nonce) if self.side == "hub" else (nonce, self.nonce)
        self.key = hmac.digest(self.token, b"".join(both), "sha256")
        self.flush()
        early, self.early = self.early, []
        for message in early:
            self.send(message)

    def signature(self, side: str, number: int, data: bytes) -> bytes:
        words = b"%s %d " % (side.encode(), number) + data
        # hmac.digest() lets go of the GIL: with many threads each signature then waits for others.
        return hmac.new(self.key, words, "sha256").hexdigest().encode()

    def close(self) -> None:
        self.connection.close()
