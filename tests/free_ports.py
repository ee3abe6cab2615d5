"""Ports for those that listen a moment later."""

import random
import socket

# The kernel assigns ephemeral ports from 32,768 on.
PORTS = range(10_000, 30_000)


def free_ports(count: int) -> list[int]:
    """Return free ports; other tests may be looking for some at the same time."""
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
