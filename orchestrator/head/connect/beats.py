"""Lets nodes hear from this head while it is busy elsewhere: a server leaves a head that is silent.

A head downloads packages, reads a tree, or serves a node whose line is slow; meanwhile it asks the
other nodes nothing, for longer than their servers wait.
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
    """Has each open channel beat in turn, in a thread that the first one starts."""

    def __init__(self) -> None:
        self.channels: weakref.WeakSet[Beating] = weakref.WeakSet()
        self.changing = threading.Lock()
        self.thread: threading.Thread | None = None

    def keep(self, channel: Beating) -> None:
        """Let a channel beat until it is dropped, or no other thread has it any more."""
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
            while channels:  # One that was closed is not kept by this list.
                channels.pop().beat_if_quiet()


beats = Beats()
