"""Finds and holds the TCP port at which the ranks of a job meet; sees that it is free again."""

from __future__ import annotations

import socket

PORTS_TO_TRY = 200


class Port:
    """A TCP port held for a job until its supervisor ends, against a second launch just then.

    The TCP port itself must stay free for torchrun, so what is held is an abstract Unix socket of
    the port's name: it lives in the same network namespace and goes away with its last holder.
    """

    def __init__(self, wanted: int, exact: bool) -> None:
        self.holder = socket.socket(socket.AF_UNIX)
        self.number = 0
        for number in range(wanted, wanted + 1 if exact else min(wanted + PORTS_TO_TRY, 65536)):
            if port_is_free(number):
                if self.hold(number):
                    self.number = number
                    return
                # All of their names may be taken: any user of the machine can do that.
                self.number = self.number or (0 if exact else number)

    def hold(self, number: int) -> bool:
        try:
            self.holder.bind(f"\0orchestrator-port-{number}")
        except OSError:
            return False
        return True


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
