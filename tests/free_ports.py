"""Ports for those that listen a moment later."""

from __future__ import annotations

import random
import socket

PORTS = range(10_000, 30_000)  # the kernel gives others, from 32,768 on, to whoever calls


def free_ports(count: int) -> list[int]:
    """Return ports that nobody has; other tests look for some at the same time."""
    chance, found = random.SystemRandom(), set[int]()
    while len(found) < count:
        port = chance.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            found.add(port)
    return sorted(found)
