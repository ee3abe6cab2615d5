"""Holds the ports of a job that is about to start: one for its ranks, one for its supervisors."""

from __future__ import annotations

import contextlib
import errno
import socket

from orchestrator.node.server.session import ServerSession, SessionState
from orchestrator.protocol.requests.machine import PortRequest

PORTS_TO_TRY = 200


class Ports(SessionState):
    """The ports that this session holds for one job."""

    def __init__(self, session: ServerSession) -> None:
        super().__init__(session)
        # The number of the ranks' port.
        self.number = 0
        # The socket that holds this number.
        self.holder: socket.socket | None = None
        # The other nodes' supervisors connect to this socket.
        self.peers: socket.socket | None = None

    def hold(self, request: PortRequest) -> None:
        if self.holder:
            self.holder.close()
        self.number, self.holder = hold_port(request.wanted, exact=request.exact)
        if request.peers:
            self.peers = listen_except(self.number)

    @property
    def peers_number(self) -> int:
        return int(self.peers.getsockname()[1]) if self.peers else 0

    @property
    def files(self) -> list[int]:
        """Return the descriptors that hold the ports; a supervisor inherits them."""
        return [held.fileno() for held in (self.holder, self.peers) if held]

    def hand_over(self) -> None:
        """Close the supervisors' port in this process; the started supervisor keeps it open."""
        if self.peers:
            self.peers.close()
            self.peers = None


def hold_port(wanted: int, *, exact: bool) -> tuple[int, socket.socket | None]:
    """Reserve a TCP port until the job's supervisor ends, against other launches at this moment.

    The TCP port itself must stay free for torchrun. So the reservation is an abstract Unix socket
    named after the port: it lives in the same network namespace and ends with its last holder.
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
                # All these names may be taken: any user of the machine can bind them.
                unheld = unheld or (0 if exact else number)
    return unheld, None


def port_is_free(number: int) -> bool:
    try:
        listening_socket(number).close()
    except OSError:
        return False
    return True


def listening_socket(port: int = 0, backlog: int = 128) -> socket.socket:
    """Listen on a port (0: any free one), on all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        try:
            return socket.create_server(
                ("", port), family=family, backlog=backlog, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                # Any other error means that IPv6 is disabled here.
                raise
    return socket.create_server(("", port), backlog=backlog)


def listen_except(avoid: int) -> socket.socket | None:
    """Listen on a free port other than `avoid`; return None if that is not possible."""
    with contextlib.suppress(OSError):
        while (server := listening_socket(backlog=4096)).getsockname()[1] == avoid:
            server.close()
        return server
    return None
