"""One job's log on one node: the output of all its ranks in one file, and which bytes are whose.

`log` holds the bytes as they were printed, whole lines at a time where a line ends soon enough.
`ranks` holds lines "<offset> <stream>": from there on the bytes are that stream's. Both only grow,
so a reader elsewhere needs no more than its own file's length to go on where it stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from orchestrator.common import hiding

PARTIAL_SECONDS = 0.1  # how long a line without an end (a prompt, a bar) waits for its rest
PARTIAL_BYTES = 1 << 16
NO_RANK = "-"
LAST = 1 << 15  # a crash dump lists the stacks of many threads


class Partial:
    """The beginning of a line whose end has not arrived yet."""

    def __init__(self) -> None:
        self.data = b""
        self.since = 0.0
        self.written = b""  # the last bytes before: a secret may have begun in them


class JobLog:
    def __init__(self, log: str, ranks: str, before: int = 0, secrets: Sequence[str] = ()) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.log = os.open(log, flags, 0o600)
        self.ranks = os.open(ranks, flags, 0o600)
        self.mask = hiding.Mask(secrets)
        self.before = before  # bytes of earlier attempts, which stand before these at the head
        self.size = os.fstat(self.log).st_size
        self.stream = ""
        self.partials: dict[str, Partial] = {}
        self.last: dict[str, bytes] = {}  # stream -> what it said last
        self.record = b""  # what a full disk left over of a record
        self.lost = 0  # bytes that a full disk refused
        self.trouble = ""

    def feed(self, stream: str, data: bytes) -> bool:
        """Take what a stream printed; return whether the file has more than before."""
        before = self.size
        self.last[stream] = (self.last.get(stream, b"") + data)[-LAST:]
        partial = self.partials.setdefault(stream, Partial())
        begun = bool(partial.data)
        data = partial.data + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > PARTIAL_BYTES:
            end = len(data) - self.mask.begun(data)
        if end:
            self._write(stream, self._masked(partial, data[:end]))
        partial.data = data[end:]
        if end or not begun:  # one that only grows (dots, a bar) waits from its beginning on
            partial.since = time.monotonic()
        return self.size > before

    def note(self, line: bytes) -> None:
        """Write a line of ours, which is no rank's last word."""
        self._write(NO_RANK, memoryview(line))

    def flush(self, *, everything: bool = False) -> float | None:
        """Write partial lines that waited long enough; return when the next is due, or None."""
        now = time.monotonic()
        due = None
        for stream, partial in self.partials.items():
            if not partial.data:
                continue
            left = partial.since + PARTIAL_SECONDS - now
            if everything or left <= 0:
                held = 0 if everything else self.mask.begun(partial.data)
                end = len(partial.data) - held  # the rest of a secret comes, or another word
                if end:
                    self._write(stream, self._masked(partial, partial.data[:end]))
                    partial.data = partial.data[end:]
            else:
                due = left if due is None else min(due, left)
        return due

    def _masked(self, partial: Partial, data: bytes) -> memoryview:
        if not self.mask.secrets:
            return memoryview(data)
        before = len(partial.written)
        whole = partial.written + data
        partial.written = whole[-self.mask.longest :]
        return memoryview(self.mask.masked(whole))[before:]

    def _write(self, stream: str, data: memoryview) -> None:
        """Write if possible: the job goes on without its log, and a gap is reported later."""
        if self.lost:
            notice = f"\norchestrator: {self.lost} bytes of output were lost here: {self.trouble}\n"
            if self._append(stream, memoryview(notice.encode())) < len(notice.encode()):
                self.lost += len(data)
                return
            self.lost = 0
        self.lost += len(data) - self._append(stream, data)

    def _append(self, stream: str, data: memoryview) -> int:
        """Append bytes, after their record in `ranks`; return how many could be written."""
        try:
            self._write_record()
            if stream != self.stream:
                self.stream = stream
                self.record = f"{self.before + self.size} {stream}\n".encode()
                self._write_record()
            write_all(self.log, data)
        except OSError as error:
            self.trouble = error.strerror or str(error)
        before, self.size = self.size, os.fstat(self.log).st_size
        return self.size - before

    def _write_record(self) -> None:
        while self.record:
            self.record = self.record[os.write(self.ranks, self.record) :]


def write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
