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
    """Has each open channel beat in turn, in a thread of its own."""

    def __init__(self) -> None:
        self.channels: weakref.WeakSet[Beating] = weakref.WeakSet()
        self.changing = threading.Lock()
        self.thread: threading.Thread | None = None

    def keep(self, channel: Beating) -> None:
        """Let a channel beat until it is dropped, or nobody has it any more."""
        with self.changing:
            self.channels.add(channel)
            if self.thread is None:
                self.thread = threading.Thread(target=self.run, name="beats", daemon=True)
                self.thread.start()

    def drop(self, channel: Beating) -> None:
        with self.changing:
            self.channels.discard(channel)

    def run(self) -> None:
        while channels := self.due():
            for channel in channels:
                channel.beat_if_quiet()
            del channels, channel  # one that nobody has any more goes

    def due(self) -> list[Beating]:
        """Wait, and return the channels; the thread ends where there is none."""
        time.sleep(HEAD_BEAT_SECONDS)
        with self.changing:
            channels = list(self.channels)
            if not channels:
                self.thread = None
            return channels


beats = Beats()
