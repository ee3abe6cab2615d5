"""Holds the ports of a job that is about to start: its ranks', and its supervisors'."""

from __future__ import annotations

import socket

from orchestrator.node.server.visit import RoomState, Visit
from orchestrator.protocol.requests.machine import PortWish


class Ports(RoomState):
    """The ports that this visit holds for one job."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit)
        self.port: Port | None = None
        self.peers: socket.socket | None = None  # where the other nodes' supervisors will call

    def hold(self, request: PortWish) -> None:
        self.port = Port(request.wanted, request.exact)
        if request.peers:
            from orchestrator.node.peers.peers import listen  # not for every probe

            self.peers = listen(self.port.number)

    @property
    def number(self) -> int:
        return self.port.number if self.port else 0

    @property
    def peers_number(self) -> int:
        return int(self.peers.getsockname()[1]) if self.peers else 0

    @property
    def files(self) -> list[int]:
        """Return the open files that hold the ports: a supervisor inherits them."""
        holder = self.port.holder if self.port else None
        return [held.fileno() for held in (holder, self.peers) if held]

    def hand_over(self) -> None:
        """Leave the supervisors' port to the one that was started: it is closed when that ends."""
        if self.peers:
            self.peers.close()
            self.peers = None


PORTS_TO_TRY = 200


class Port:
    """A TCP port held for a job until its supervisor ends, against a second launch just then.

    The TCP port itself must stay free for torchrun, so what is held is an abstract Unix socket of
    the port's name: it lives in the same network namespace and goes away with its last holder.
    """

    def __init__(self, wanted: int, exact: bool) -> None:
        self.holder: socket.socket | None = None
        self.number = 0
        for number in range(wanted, wanted + 1 if exact else min(wanted + PORTS_TO_TRY, 65536)):
            if port_is_free(number):
                if self.hold(number):
                    self.number = number
                    return
                # All of their names may be taken: any user of the machine can do that.
                self.number = self.number or (0 if exact else number)

    def hold(self, number: int) -> bool:
        self.holder = socket.socket(socket.AF_UNIX)
        try:
            self.holder.bind(f"\0orchestrator-port-{number}")
        except OSError:
            self.close()
            return False
        return True

    def close(self) -> None:
        if self.holder:
            self.holder.close()
        self.holder = None


def port_is_free(number: int) -> bool:
    for family, everywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family) as probe_socket:
                probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe_socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe_socket.bind((everywhere, number))
        except OSError as error:
            if family == socket.AF_INET or error.errno == 98:
                return False
    return True
