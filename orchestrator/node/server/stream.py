"""Streams one run's files to the head, from the offsets that the head already has.

The channel's server calls pump(). A byte on the supervisor's socket means that there is more data.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from orchestrator.node.job.run_directory import RunDir, connect_supervisor
from orchestrator.protocol import control
from orchestrator.protocol.frames import EVENTS, LOG, OFFSET, RANKS, STREAM_CHUNK_BYTES
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.request import SupervisorGone

# Frames are delayed only if they are more than this far ahead of the even pace.
BURST_SECONDS = 1.0


class FileStreamer:
    """Sends the bytes of one run's files beyond the offsets that the head already holds."""

    def __init__(self, run: RunDir, log: int, ranks: int, events: int, gather: float = 0.0) -> None:
        self.run = run
        # Seconds between two frames if lines come faster for longer than a burst.
        self.gather = gather
        self.offsets = {LOG: log, RANKS: ranks, EVENTS: events}
        self.files: dict[bytes, int] = {}
        self.behind = True
        self.supervisor: socket.socket | None = None
        self.end_announced = False
        # The time at which all that was sent would have been sent at an even pace.
        self.due = 0.0
        try:
            self.supervisor = connect_supervisor(run)
            self.supervisor.setblocking(False)
        except OSError:
            # The supervisor has ended, so the files are complete.
            pass

    @property
    def wakeup(self) -> int | None:
        return self.supervisor.fileno() if self.supervisor else None

    def tell_of_head(self) -> None:
        """Notify the supervisor that a head follows. A short line always fits into the buffer."""
        if self.supervisor is not None:
            with contextlib.suppress(OSError):
                self.supervisor.send(control.message_to_line(control.HeadState()))

    def drain_wakeup(self) -> None:
        assert self.supervisor is not None
        try:
            notified = self.supervisor.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            notified = b""
        if not notified:
            self.supervisor.close()
            self.supervisor = None
        self.behind = True

    @property
    def left(self) -> float:
        """Return the seconds until data must be sent, if no event comes first."""
        if not self.behind:
            return float("inf")
        return max(0.0, self.due - BURST_SECONDS - time.monotonic())

    def pump(self, send: Callable[..., None], send_message: Callable[[Message], None]) -> None:
        """Send one chunk of each file.

        A record of `ranks` precedes the log bytes it describes. An event follows the log bytes
        written before it, unless they are many. An event, and the end, are sent without delay.
        """
        if not self.behind:
            return
        # Read before the sizes: if the supervisor is gone now, the files are complete.
        alone = self.supervisor is None
        events, size = self.size(EVENTS), self.size(LOG)
        if self.left and not alone and events <= self.offsets[EVENTS]:
            return
        self.behind, before = False, dict(self.offsets)
        self.pass_on(RANKS, self.size(RANKS), send)
        if not self.behind:
            self.pass_on(LOG, size, send)
        self.pass_on(EVENTS, events, send)
        # More than one chunk is sent without a pause.
        if not self.behind and self.offsets != before:
            self.due = max(self.due, time.monotonic()) + self.gather
        if alone and not self.behind and not self.end_announced:
            self.end_announced = True
            send_message(SupervisorGone())

    def pass_on(self, kind: bytes, size: int, send: Callable[..., None]) -> None:
        offset = self.offsets[kind]
        if offset < size:
            data = os.pread(self.files[kind], min(STREAM_CHUNK_BYTES, size - offset), offset)
            send(kind, OFFSET.pack(offset), data)
            self.offsets[kind] += len(data)
        self.behind = self.behind or self.offsets[kind] < size

    def size(self, kind: bytes) -> int:
        if kind not in self.files:
            path = {LOG: self.run.log, RANKS: self.run.ranks, EVENTS: self.run.events}[kind]
            try:
                self.files[kind] = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                return 0
        return os.fstat(self.files[kind]).st_size
