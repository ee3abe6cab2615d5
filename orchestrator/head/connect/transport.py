"""The interface of a transport: SSH (ssh.py), or a program's pipes (subprocess_transport.py)."""

from __future__ import annotations

import select
import socket
from pathlib import Path
from typing import Protocol

from orchestrator.head.connect.ssh_config import Destination, Login


class Channel(Protocol):
    """The streams of one program on a node. After settimeout(), a slower call is a TimeoutError."""

    def settimeout(self, timeout: float | None, /) -> None: ...

    def recv(self, nbytes: int, /) -> bytes: ...

    def sendall(self, s: bytes, /) -> None: ...

    def recv_stderr_ready(self) -> bool: ...

    def recv_stderr(self, nbytes: int, /) -> bytes: ...

    def shutdown_write(self) -> None:
        """End the program's input."""

    def recv_exit_status(self) -> int:
        """Wait for the program's exit code; -1 if a signal or a lost connection ended it."""
        ...

    def close(self) -> None: ...


class Connection(Protocol):
    """An open connection to one node."""

    address: str  # its IP address as the head sees it, or ""

    @property
    def alive(self) -> bool: ...

    def run(self, command: str, timeout: float) -> Channel: ...

    def close(self) -> None: ...


class HostResolver(Protocol):
    """Find the address behind a host as it is written in the node list."""

    @property
    def file(self) -> Path | None: ...

    def of_node(self, node: Login) -> Destination: ...


class Transport(Protocol):
    """The way from the head to the nodes of a job."""

    timeout: float

    @property
    def config(self) -> HostResolver: ...

    def connect(self, destination: Destination, timeout: float | None = None) -> Connection: ...


def readable(end: socket.socket) -> bool:
    """Tell whether something can be read now; select() knows no descriptor from 1024 on."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(0))


def notice_loss(connection: Connection, silence: float) -> None:
    """Let the kernel give up a node that acknowledges nothing for so many seconds."""
    transport = getattr(connection, "transport", None)
    sock = getattr(transport, "sock", None)  # a connection that is held has none here
    if isinstance(sock, socket.socket) and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence))
