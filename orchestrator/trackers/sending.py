"""Send values from a thread: a tracker that is slow, or gone, never keeps a training waiting."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping

from orchestrator.common.errors import OrchestratorError
from orchestrator.common.text import Say
from orchestrator.trackers.known import Opened

WAITING_LINES = 10_000  # that may wait for a tracker; later ones are left out
LAST_SECONDS = 60.0  # that the end of a training waits for a tracker
LOOK_SECONDS = 0.2  # between two looks whether it still takes anything


class Sending:
    """One tracker and its thread, which opens it, too. What fails costs the curves there, and one
    warning; what hangs costs nobody else any time."""

    def __init__(self, name: str, open: Callable[[], Opened], say: Say) -> None:
        self.name, self.open, self.say = name, open, say
        self.lines: queue.Queue[tuple[Mapping[str, float], int, float] | None] = queue.Queue(
            WAITING_LINES
        )
        self.left_out = 0
        self.sent = 0
        self.failed = False
        self.refusal: OrchestratorError | None = None  # of options that it does not know
        self.tried = threading.Event()  # to open it
        self.awaited = True  # until somebody has waited long enough for that
        self.given_up = False
        self.thread = threading.Thread(target=self._send, name=f"to {name}", daemon=True)
        self.thread.start()

    def wait_open(self, seconds: float | None = None) -> None:
        """Wait until it is open, or cannot be, and raise what the user has to mend."""
        if not self.tried.wait(seconds):
            self.awaited = False
            self.say(f"{self.name} does not open yet; nothing waits for it")
        if self.refusal is not None:
            raise self.refusal

    def log(self, values: Mapping[str, float], step: int, moment: float | None = None) -> None:
        if self.failed:
            return
        try:
            self.lines.put_nowait((values, step, time.time() if moment is None else moment))
        except queue.Full:
            if not self.left_out:
                self.say(f"WARNING: {self.name} is too slow: some values are left out there")
            self.left_out += 1

    def close(self) -> None:
        """Let what waits be sent, for a while; again, it does nothing."""
        end = time.monotonic() + LAST_SECONDS
        while self.thread.is_alive() and time.monotonic() < end:
            with contextlib.suppress(queue.Full):  # until it has failed, nobody makes room then
                self.lines.put(None, timeout=LOOK_SECONDS)
                break
        self.thread.join(max(0.0, end - time.monotonic()))
        if self.thread.is_alive():
            self.given_up = True
            self.say(f"WARNING: {self.name} did not take all values within {LAST_SECONDS:g} s")

    def _send(self) -> None:
        what = "could not be opened, and gets no values"
        try:
            tracker = self.open()
            what = "failed and is switched off from now on"
            self.tried.set()
            while (line := self.lines.get()) is not None:
                tracker.log(*line)
                self.sent += 1
            tracker.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the network, a server, a full disk)
            self.failed = True
            if isinstance(error, OrchestratorError) and self.awaited:
                self.refusal = error
            elif not self.given_up:
                self.say(f"WARNING: {self.name} {what}: {str(error) or type(error).__name__}")
            self.tried.set()
