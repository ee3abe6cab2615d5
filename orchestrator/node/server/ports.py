"""Holds the ports of a job that is about to start: its ranks', and its supervisors'."""

from __future__ import annotations

import contextlib
import errno
import socket

from orchestrator.node.server.visit import RoomState, ServerSession
from orchestrator.protocol.requests.machine import PortWish

PORTS_TO_TRY = 200


class Ports(RoomState):
    """The ports that this visit holds for one job."""

    def __init__(self, visit: ServerSession) -> None:
        super().__init__(visit)
        self.number = 0  # of the ranks' port
        self.holder: socket.socket | None = None  # of that number
        self.peers: socket.socket | None = None  # where the other nodes' supervisors will call

    def hold(self, request: PortWish) -> None:
        if self.holder:
            self.holder.close()
        self.number, self.holder = hold(request.wanted, exact=request.exact)
        if request.peers:
            self.peers = listen(self.number)

    @property
    def peers_number(self) -> int:
        return int(self.peers.getsockname()[1]) if self.peers else 0

    @property
    def files(self) -> list[int]:
        """Return the open files that hold the ports: a supervisor inherits them."""
        return [held.fileno() for held in (self.holder, self.peers) if held]

    def hand_over(self) -> None:
        """Leave the supervisors' port to the one that was started: it is closed when that ends."""
        if self.peers:
            self.peers.close()
            self.peers = None


def hold(wanted: int, *, exact: bool) -> tuple[int, socket.socket | None]:
    """Hold a TCP port for a job until its supervisor ends, against a second launch just then.

    The TCP port itself must stay free for torchrun, so what is held is an abstract Unix socket of
    the port's name: it lives in the same network namespace and goes away with its last holder.
    """
    unheld = 0
    for number in range(wanted, wanted + 1 if exact else min(wanted + PORTS_TO_TRY, 65536)):
        if port_is_free(number):
            holder = socket.socket(socket.AF_UNIX)
            try:
                holder.bind(f"\0orchestrator-port-{number}")
                return number, holder
            except OSError:
                holder.close()
                # All of their names may be taken: any user of the machine can do that.
                unheld = unheld or (0 if exact else number)
    return unheld, None


def port_is_free(number: int) -> bool:
    try:
        listening(number).close()
    except OSError:
        return False
    return True


def listening(port: int = 0, backlog: int = 128) -> socket.socket:
    """Listen at a port (0: any that is free), on all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        try:
            return socket.create_server(
                ("", port), family=family, backlog=backlog, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise  # else IPv6 is switched off here
    return socket.create_server(("", port), backlog=backlog)


def listen(avoid: int) -> socket.socket | None:
    """Listen on a free port, before the first call; return None where that is denied."""
    with contextlib.suppress(OSError):
        while (server := listening(backlog=4096)).getsockname()[1] == avoid:
            server.close()
        return server
    return None
