"""One job's log on one node: the output of all its ranks in one file, and whose bytes stand where.

`log` holds the bytes as they were printed, whole lines at a time where a line ends soon enough.
`ranks` holds lines "<offset> <stream>": from there on the bytes are that stream's. Both are append-only,
so a reader elsewhere needs no more than its own file's length to go on where it stopped.
"""

from __future__ import annotations

import errno
import os
import time

PARTIAL_SECONDS = (
    0.1  # a line without an end (a prompt, a progress bar) waits this long for its rest
)
PARTIAL_BYTES = 1 << 16


class Partial:
    """The beginning of a line whose end has not come yet."""

    def __init__(self) -> None:
        self.data = b""
        self.since = 0.0


class JobLog:
    def __init__(self, log: str, ranks: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.log = os.open(log, flags, 0o600)
        self.ranks = os.open(ranks, flags, 0o600)
        self.size = os.fstat(self.log).st_size
        self.stream = ""
        self.partials: dict[str, Partial] = {}
        self.lost = 0  # bytes that a full disk refused

    def feed(self, stream: str, data: bytes) -> None:
        partial = self.partials.get(stream)
        if partial is not None and partial.data:
            data = partial.data + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > PARTIAL_BYTES:
            end = len(data)
        if end:
            self._write(stream, memoryview(data)[:end])
        if partial is None:
            partial = self.partials[stream] = Partial()
        partial.data = data[end:]
        partial.since = time.monotonic()

    def flush(self, *, everything: bool = False) -> float | None:
        """Write beginnings that waited long enough; seconds until the next one is due, or None."""
        now = time.monotonic()
        due = None
        for stream, partial in self.partials.items():
            if not partial.data:
                continue
            left = partial.since + PARTIAL_SECONDS - now
            if everything or left <= 0:
                self._write(stream, memoryview(partial.data))
                partial.data = b""
            else:
                due = left if due is None else min(due, left)
        return due

    def _write(self, stream: str, data: memoryview) -> None:
        if self.lost:
            self._admit_loss()
        try:
            if stream != self.stream:
                write_all(self.ranks, memoryview(f"{self.size} {stream}\n".encode()))
                self.stream = stream
            self.size += write_all(self.log, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The job matters more than its log: it goes on, and the gap is said as soon as it can be.
            self.lost += len(data)
            self.size = os.fstat(self.log).st_size

    def _admit_loss(self) -> None:
        words = f"\norchestrator: {self.lost} bytes of output were lost here: the disk was full\n"
        try:
            self.size += write_all(self.log, memoryview(words.encode()))
            self.lost = 0
        except OSError:
            self.size = os.fstat(self.log).st_size


def write_all(fd: int, data: memoryview) -> int:
    total = len(data)
    while data:
        data = data[os.write(fd, data) :]
    return total
