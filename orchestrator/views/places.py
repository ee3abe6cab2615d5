"""Keeps room for the owner of a server: who has shown no token has few places, for a short time.

Every user of this machine can connect to a loopback port, and may stay silent there, send a request
byte by byte, or never read the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

TOKEN_SECONDS = 5.0  # within which a client shows the token


@dataclass
class Places:
    """So many clients at a time: whoever comes when all places are taken has the oldest one's."""

    most: int
    taken: dict[Hashable, Callable[[], None]] = field(default_factory=dict)  # -> hangs up on it
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, client: Hashable, hang_up: Callable[[], None]) -> None:
        with self.lock:
            full = len(self.taken) >= self.most
            oldest = self.taken.pop(next(iter(self.taken))) if full else None
            self.taken[client] = hang_up
        if oldest is not None:
            oldest()

    def leave(self, client: Hashable) -> None:
        with self.lock:
            self.taken.pop(client, None)
