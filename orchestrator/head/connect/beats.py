"""Sends heartbeats to nodes while the head is busy: a server drops a head that stays silent.

The head may download packages, read a tree, or transfer files to a slow node. It then sends the
other nodes no request for longer than their servers' timeout.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

from orchestrator.protocol.timing import HEAD_BEAT_SECONDS


class Beating(Protocol):
    def beat_if_quiet(self) -> None: ...


class Beats:
    """Sends heartbeats on each open channel, from one thread that the first channel starts."""

    def __init__(self) -> None:
        self.channels: weakref.WeakSet[Beating] = weakref.WeakSet()
        self.changing = threading.Lock()
        self.thread: threading.Thread | None = None

    def keep(self, channel: Beating) -> None:
        """Send heartbeats on a channel until it is dropped or garbage-collected."""
        with self.changing:
            self.channels.add(channel)
            if self.thread is None:
                self.thread = threading.Thread(target=self.run, name="beats", daemon=True)
                self.thread.start()

    def drop(self, channel: Beating) -> None:
        with self.changing:
            self.channels.discard(channel)

    def run(self) -> None:
        while True:
            time.sleep(HEAD_BEAT_SECONDS)
            with self.changing:
                channels = list(self.channels)
            # Popping drops the reference, so this list does not keep a closed channel alive.
            while channels:
                channels.pop().beat_if_quiet()


beats = Beats()
