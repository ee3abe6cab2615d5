"""Send values from a thread: a tracker that is slow, or gone, never keeps a training waiting."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping

from orchestrator.common.text import Say
from orchestrator.trackers.known import Opened

WAITING_LINES = 10_000  # that may wait for a tracker; later ones are left out
LAST_SECONDS = 60.0  # that the end of a training waits for a tracker
LOOK_SECONDS = 0.2  # between two looks whether it still takes anything


class Sending:
    """One tracker and its thread. What fails costs the curves there, and one warning."""

    def __init__(self, name: str, tracker: Opened, say: Say) -> None:
        self.name, self.tracker, self.say = name, tracker, say
        self.lines: queue.Queue[tuple[Mapping[str, float], int, float] | None] = queue.Queue(
            WAITING_LINES
        )
        self.left_out = 0
        self.sent = 0
        self.failed = False
        self.thread = threading.Thread(target=self._send, name=f"to {name}", daemon=True)
        self.thread.start()

    def log(self, values: Mapping[str, float], step: int, moment: float | None = None) -> None:
        if self.failed:
            return
        try:
            self.lines.put_nowait((values, step, time.time() if moment is None else moment))
        except queue.Full:
            if not self.left_out:
                self.say(f"WARNING: {self.name} is too slow: some values are left out there")
            self.left_out += 1

    @property
    def half_full(self) -> bool:
        """Tell whether much waits already: who can come again later does."""
        return self.lines.qsize() > WAITING_LINES // 2

    def close(self) -> None:
        """Let what waits be sent, for a while; again, it does nothing."""
        end = time.monotonic() + LAST_SECONDS
        while self.thread.is_alive() and time.monotonic() < end:
            with contextlib.suppress(queue.Full):  # until it has failed, nobody makes room then
                self.lines.put(None, timeout=LOOK_SECONDS)
                break
        self.thread.join(max(0.0, end - time.monotonic()))
        if self.thread.is_alive():
            self.say(f"WARNING: {self.name} did not take all values within {LAST_SECONDS:g} s")

    def _send(self) -> None:
        try:
            while (line := self.lines.get()) is not None:
                self.tracker.log(*line)
                self.sent += 1
            self.tracker.close()
        except Exception as error:  # noqa: BLE001 (the network, a server, a full disk)
            self.failed = True
            self.say(f"WARNING: {self.name} failed and is switched off from now on: {error}")
