"""The interface of a transport: fabric (ssh.py), or a program's pipes (openssh.py, srun, local)."""

from __future__ import annotations

import concurrent.futures
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.ssh_config import Destination, Login
from orchestrator.head.connect.way import Way

T = TypeVar("T")
NEARLY_SECONDS = 0.2  # An error so near to the deadline is that of the deadline.


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
    """Return True if something can be read now; select() knows no descriptor from 1024 on."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(0))


def left(deadline: float) -> float:
    """Return the seconds until a deadline, and a moment after it."""
    return max(0.05, deadline - time.monotonic())


def within(seconds: float, call: Callable[[], T]) -> T:
    """Call what has no time limit of its own in a thread; TimeoutError where it takes longer."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised in the caller
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError:
        raise TimeoutError("timed out") from None


def notice_loss(connection: Connection, silence: float) -> None:
    """Let the kernel give up a node that acknowledges nothing for so many seconds."""
    transport = getattr(connection, "transport", None)
    sock = getattr(transport, "sock", None)
    if isinstance(sock, socket.socket) and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence))
