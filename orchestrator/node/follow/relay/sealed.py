"""The TLS between a relay and a node behind it, over a socket that somebody else reads and writes.

The head signs a certificate for each of them with a key that it keeps in memory. It sends them over
SSH, so either end knows the other one before the first byte.
"""

from __future__ import annotations

import os
import socket
import ssl
import time

READ_BYTES = 1 << 17


def context(identity: str, authority: str, *, calls: bool) -> ssl.SSLContext:
    """Return what shows this certificate, and trusts those alone that the authority has signed."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if calls else ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=authority)
    if not calls:
        made.num_tickets = 0  # nobody comes twice
    file = os.memfd_create("identity", os.MFD_CLOEXEC)  # a key is written to no disk
    try:
        os.write(file, identity.encode("ascii"))
        made.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return made


class Sealed:
    """One end of it. A bad certificate, or a changed byte, is an ssl.SSLError, an OSError."""

    def __init__(self, how: ssl.SSLContext, name: str | None = None) -> None:
        """`name` is what the other end's certificate says; None at the end that is called."""
        self.came, self.goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = name is None
        self.tls = how.wrap_bio(self.came, self.goes, server_side=server, server_hostname=name)
        self.proved = False

    def open(self, data: bytes) -> bytes:
        """Take what came; return what the other end says with it, perhaps nothing yet."""
        said = []
        self.came.write(data)
        try:
            if not self.proved:
                self.tls.do_handshake()
                self.proved = True
            while self.came.pending and (piece := self.tls.read(READ_BYTES)):
                said.append(piece)
        except ssl.SSLWantReadError:
            pass
        return b"".join(said)

    def seal(self, data: bytes) -> bytes:
        """Return what has to be carried so that the other end reads this."""
        self.tls.write(data)
        return self.goes.read()

    def agree(self, connection: socket.socket, deadline: float) -> bytes:
        """Prove each other over this socket; return what the other end has said by then."""
        said = self.open(b"")
        connection.sendall(self.goes.read())
        while not self.proved:
            said += self.open(some(connection, deadline))
            connection.sendall(self.goes.read())
        return said


def some(connection: socket.socket, deadline: float) -> bytes:
    """Return what comes next, until a deadline."""
    connection.settimeout(max(0.01, deadline - time.monotonic()))
    return received(connection)


def received(connection: socket.socket) -> bytes:
    data = connection.recv(READ_BYTES)
    if not data:
        raise ConnectionResetError("it hung up")
    return data
