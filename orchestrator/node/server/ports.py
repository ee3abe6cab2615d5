"""Holds the ports of a job that is about to start: its ranks', and its supervisors'."""

from __future__ import annotations

import socket

from orchestrator.node.job.port import Port
from orchestrator.node.server.visit import RoomState, Visit
from orchestrator.protocol.requests.machine import PortWish


class Ports(RoomState):
    """The ports that this visit holds for one job."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit)
        self.port: Port | None = None
        self.peers: socket.socket | None = None  # where the other nodes' supervisors will call

    def hold(self, wish: PortWish) -> None:
        self.port = Port(wish.wanted, wish.exact)
        if wish.peers:
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
        return [held.fileno() for held in (self.port and self.port.holder, self.peers) if held]

    def hand_over(self) -> None:
        """Leave the supervisors' port to the one that was started: it is closed when that ends."""
        if self.peers:
            self.peers.close()
            self.peers = None
