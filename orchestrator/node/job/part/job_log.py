"""One job's log on one node: the output of all its ranks in one file, and which bytes are whose.

`log` holds the bytes as they were printed, whole lines at a time where a line ends soon enough.
`ranks` holds lines "<offset> <stream>": from there on the bytes are that stream's. Both only grow,
so a reader elsewhere needs no more than its own file's length to go on where it stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import termios
import time
from collections.abc import Callable, Sequence

from orchestrator.common import files, hiding
from orchestrator.node.peers.peers import EventLoop

PARTIAL_SECONDS = 0.1  # how long a line without an end (a prompt, a bar) waits for its rest
PARTIAL_BYTES = 1 << 16
NO_RANK = "-"
LAST = 1 << 15  # a crash dump lists the stacks of many threads


class PartialLine:
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
        self.partials: dict[str, PartialLine] = {}
        self.last: dict[str, bytes] = {}  # stream -> what it said last
        self.record = b""  # what a full disk left over of a record
        self.lost = 0  # bytes that a full disk refused
        self.trouble = ""

    def feed(self, stream: str, data: bytes) -> bool:
        """Take what a stream printed; return whether the file has more than before."""
        before = self.size
        self.last[stream] = (self.last.get(stream, b"") + data)[-LAST:]
        partial = self.partials.setdefault(stream, PartialLine())
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

    def _masked(self, partial: PartialLine, data: bytes) -> memoryview:
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
            while data:
                data = data[os.write(self.log, data) :]
        except OSError as error:
            self.trouble = error.strerror or str(error)
        before, self.size = self.size, os.fstat(self.log).st_size
        return self.size - before

    def _write_record(self) -> None:
        while self.record:
            self.record = self.record[os.write(self.ranks, self.record) :]


# -- what is printed ------------------------------------------------------------------------------

F_SETPIPE_SZ = 1031
READ_BYTES = 1 << 20
MOST_READS = 64  # of an output, where more may come than can be read


class RankOutputs:
    """Reads what the processes of a job print, and feeds the job's log with it."""

    def __init__(
        self, loop: EventLoop, log: JobLog, named: Callable[[str], str], ring: Callable[[], None]
    ) -> None:
        """`named` returns the name in the log of what a stream prints now."""
        self.loop, self.log, self.named, self.ring = loop, log, named, ring
        self.streams: dict[int, str] = {}  # file descriptor -> stream

    def watch(self, fd: int, stream: str) -> None:
        self.streams[fd] = stream
        self.loop.watch(fd, lambda: self.read(fd))

    def of(self, stream: str) -> list[int]:
        return [fd for fd, name in self.streams.items() if name == stream]

    def read(self, fd: int) -> bool:
        """Read once; return whether there was anything."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.loop.unwatch(fd)
            del self.streams[fd]
            return False
        if self.log.feed(self.named(self.streams[fd]), data):
            self.ring()
        return True

    def drain(self, stream: str = "") -> None:
        """Read what was printed so far, or by one stream; what is left running may never stop."""
        for fd in self.of(stream) if stream else list(self.streams):
            for _ in range(MOST_READS):
                if not has_bytes(fd) or not self.read(fd):
                    break

    def note(self, data: bytes) -> None:
        """Write a line of ours into the log."""
        self.log.note(data)
        self.ring()

    def flush(self) -> float:
        """Write unfinished lines that are due; return the seconds until the next one is."""
        before = self.log.size
        due = self.log.flush()
        if self.log.size > before:
            self.ring()
        return 60.0 if due is None else due


def has_bytes(fd: int) -> bool:
    """Return whether there is something to read; the end of all writers does not count."""
    return fcntl.ioctl(fd, termios.FIONREAD, bytes(4)) != bytes(4)


def open_fifo(path: str) -> int:
    with files.making_sockets():
        os.mkfifo(path, 0o600)
    # Read and write, so that it neither blocks here nor ends when one writer closes it.
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(OSError):  # the user's limit for big pipes: the usual 64 KiB work too
        fcntl.fcntl(fd, F_SETPIPE_SZ, READ_BYTES)
    return fd
