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
from orchestrator.head.connect.reach import environment_of
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.connect.transport import Transport
from orchestrator.head.held import socket_file
from orchestrator.head.held.route import route_to, to_data
from orchestrator.head.held.transport import HeldTransport, ask, server_like

PATIENCE = 20.0  # on a machine that is busy; where nobody listens there is no wait


@dataclass(frozen=True)
class Held:
    """A connection that is held, or is to be."""

    node: str  # user@host:port
    state: str  # open, connecting, or lost
    why: str  # it is lost
    sessions: int  # of commands that run now
    ready: bool  # a server of ours waits there for the next command


@dataclass(frozen=True)
class Holding:
    """The process that holds connections, and what it holds."""

    pid: int
    idle: float  # seconds without use after which it ends
    connections: tuple[Held, ...]


def look() -> Holding | None:
    """Ask what is held; None if nothing is."""
    sock = socket_file.call()
    if sock is None:
        return None
    with sock:
        return _holding(socket_file.peer(sock)[0], _ask(sock, {"do": "list"}))


def hold(transport: Transport, nodes: Sequence[Login], idle: float) -> Holding | None:
    """Ask for connections to these nodes to be held; None if no process of this program is there.

    It connects by itself, while the caller goes on.
    """
    sock = socket_file.call()
    if sock is None:
        return None
    with sock:
        request = {"do": "hold", "idle": idle, "routes": _routes(transport, nodes)}
        request["agent"] = os.environ.get("SSH_AUTH_SOCK", "")
        answer = _ask(sock, request)
        return _holding(socket_file.peer(sock)[0], answer) if answer else None


def can_hold(transport: Transport) -> bool:
    return isinstance(transport, HeldTransport)


def _routes(transport: Transport, nodes: Sequence[Login]) -> list[dict[str, Any]]:
    if not isinstance(transport, HeldTransport):
        return []
    listed = []
    for node in nodes:
        route = route_to(transport.config, transport.config.of_node(node))
        if route is not None:
            how = {"strict": transport.strict, "timeout": transport.timeout}
            server = server_like(environment_of(node))
            listed.append({"key": route.key, "route": to_data(route), "server": server, **how})
    return listed


def _ask(sock: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    sock.settimeout(PATIENCE)
    try:
        return ask(sock, request)
    except (OSError, ValueError):
        return {}


def _holding(pid: int, answer: dict[str, Any]) -> Holding:
    connections = tuple(Held(**item) for item in answer.get("connections", ()))
    return Holding(pid, float(answer.get("idle", 0.0)), connections)


def retire() -> None:
    """Let the process that holds connections end once the commands that use it now have ended."""
    sock = socket_file.call()
    if sock is not None:
        with sock:
            _ask(sock, {"do": "retire"})


def end() -> Holding | None:
    """End the process that holds connections, and wait until it is gone; return what it held.

    Whatever program it runs: the one before an update is ended, too.
    """
    sock = socket_file.call()
    if sock is None:
        return None
    with sock:
        pid = socket_file.peer(sock)[0]
        try:
            process = os.pidfd_open(pid)
        except OSError:  # it is ending
            return None
        try:
            held = _holding(pid, _ask(sock, {"do": "list"}))
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
    return bool(poll.poll(PATIENCE * 1000))
