"""Say to the process that holds connections what to hold, ask what it holds, and end it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.common.errors import CheckFailed
from orchestrator.head.connect.held import wire
from orchestrator.head.connect.held.transport import HeldTransport
from orchestrator.head.connect.ssh_config import Login

PATIENCE_SECONDS = 20.0  # on a machine that is busy; where nobody listens there is no wait


@dataclass(frozen=True)
class Held:
    """A connection that is held, or is to be."""

    node: str  # user@host:port
    state: str  # open, connecting, or lost
    why: str  # it is lost
    sessions: int  # of commands that run now


@dataclass(frozen=True)
class Holding:
    """The process that holds connections, and what it holds."""

    pid: int
    idle: float  # seconds without use after which it ends
    connections: tuple[Held, ...]


def holding() -> Holding | None:
    """Ask what is held; None if nothing is."""
    sock = wire.call()
    if sock is None:
        return None
    with sock:
        return _holding(sock, _ask(sock, {"do": "list"}))


def hold(transport: HeldTransport, nodes: Sequence[Login], idle: float) -> Holding | None:
    """Ask for connections to these nodes to be held; None if no process of this program is there.

    It reads the ssh_config by itself and connects, while the caller goes on.
    """
    sock = wire.call()
    if sock is None:
        return None
    file = transport.config.file
    request = {
        "do": "hold",
        "idle": idle,
        "nodes": [(node.host, node.user, node.port) for node in nodes],
        "ssh_config": str(file.absolute()) if file else None,
        "strict": transport.strict,
        "timeout": transport.timeout,
        "agent": os.environ.get("SSH_AUTH_SOCK", ""),
    }
    with sock:
        answer = _ask(sock, request)
        return _holding(sock, answer) if answer else None


def _ask(sock: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    sock.settimeout(PATIENCE_SECONDS)
    try:
        return wire.ask(sock, request)
    except (OSError, ValueError):
        return {}


def _holding(sock: socket.socket, answer: dict[str, Any]) -> Holding:
    connections = tuple(Held(**item) for item in answer.get("connections", ()))
    return Holding(wire.peer(sock)[0], float(answer.get("idle", 0.0)), connections)


def retire() -> None:
    """Let the process that holds connections end once the commands that use it now have ended."""
    sock = wire.call()
    if sock is not None:
        with sock:
            _ask(sock, {"do": "retire"})


def end() -> Holding | None:
    """End the process that holds connections, and wait until it is gone; return what it held.

    Whatever program it runs: the one before an update is ended, too.
    """
    sock = wire.call()
    if sock is None:
        return None
    with sock:
        pid = wire.peer(sock)[0]
        try:
            process = os.pidfd_open(pid)
        except OSError:  # it is ending
            return None
        try:
            held = _holding(sock, _ask(sock, {"do": "list"}))
            _ask(sock, {"do": "end"})
            if not _gone(process):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            if not _gone(process):
                raise CheckFailed(
                    f"process {pid}, which holds SSH connections, does not end",
                    f"look at it: ps -fp {pid}",
                )
        finally:
            os.close(process)
    return held


def _gone(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(PATIENCE_SECONDS * 1000))
