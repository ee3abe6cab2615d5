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
    """Raised if the server closes the connection before the login; a retry may succeed."""


class Channel(Protocol):
    """The streams of one program on a node; calls raise TimeoutError after settimeout()."""

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

    # The IP address of the node as the head sees it, or "".
    address: str
    way: Way

    @property
    def alive(self) -> bool: ...

    def run(self, command: str, timeout: float) -> Channel: ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Opens connections from the head to the nodes of a job."""

    timeout: float

    def host_of(self, node: Login) -> str:
        """Return the host name or address that a node of the list resolves to in ssh_config."""
        ...

    def connect(self, node: Login, timeout: float | None = None) -> Connection: ...


def seconds_left(deadline: float) -> float:
    return max(0.05, deadline - time.monotonic())


def notice_loss(connection: Connection, silence: float) -> None:
    """Set TCP_USER_TIMEOUT: the kernel drops a link without acknowledgements for `silence` s."""
    transport = getattr(connection, "transport", None)
    sock = getattr(transport, "sock", None)
    if isinstance(sock, socket.socket) and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence))
