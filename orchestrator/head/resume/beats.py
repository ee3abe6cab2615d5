"""Let nodes hear from this head while it asks others: a server leaves a head that is silent.

Each has a thread of its own, so that one that does not answer keeps no other waiting.
"""

from __future__ import annotations

import contextlib
import threading

from orchestrator.common.errors import NodeError
from orchestrator.head.resume.holder import Holder
from orchestrator.protocol.requests.request import Beat
from orchestrator.protocol.timing import HEAD_BEAT

ANSWER_SECONDS = 30.0


class Beats:
    """The beats of all nodes that take part in a search, from when they are reached to its end."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []

    def begin(self, holder: Holder) -> None:
        thread = threading.Thread(target=self.beat, args=(holder,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def beat(self, holder: Holder) -> None:
        while not self.over.wait(HEAD_BEAT):
            if holder.lock.acquire(blocking=False):  # else somebody asks it something just now
                try:
                    with contextlib.suppress(NodeError):  # whoever needs the node hears that
                        holder.open.ask(Beat(), ANSWER_SECONDS)
                finally:
                    holder.lock.release()

    def end(self) -> None:
        """End them, and return once nobody reads from these channels any more."""
        self.over.set()
        for thread in self.threads:
            thread.join()
