"""The interface of a transport: fabric (ssh.py), or a program's pipes (openssh.py, srun, local)."""

from __future__ import annotations

import socket
import time
from typing import Protocol

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.connect.way import Way


class NeedsSsh(NodeError):
    """Raised where fabric cannot log in, and the ssh program perhaps can."""


class Dropped(Exception):
    """The other side hung up before the login, which is worth another try."""


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
    way: Way

    @property
    def alive(self) -> bool: ...

    def run(self, command: str, timeout: float) -> Channel: ...

    def close(self) -> None: ...


class Transport(Protocol):
    """The way from the head to the nodes of a job."""

    timeout: float

    def host_of(self, node: Login) -> str:
        """Return the name or address to which a node's name in the list leads."""
        ...

    def connect(self, node: Login, timeout: float | None = None) -> Connection: ...


def left(deadline: float) -> float:
    return max(0.05, deadline - time.monotonic())


def notice_loss(connection: Connection, silence: float) -> None:
    """Let the kernel give up a node that acknowledges nothing for so many seconds."""
    transport = getattr(connection, "transport", None)
    sock = getattr(transport, "sock", None)
    if isinstance(sock, socket.socket) and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence))
