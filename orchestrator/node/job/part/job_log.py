"""One job's log on one node: the output of all its ranks, and an index of the ranks' bytes.

`log` holds the bytes as they were printed, in whole lines where a line ends soon enough.
`ranks` holds lines "<offset> <stream> <time>": the bytes from that offset on are that stream's, and
were printed from that time on. Both only grow, so a reader elsewhere can resume at its own file's
length.
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

# An unfinished line (a prompt, a progress bar) is written after this time, and the time of output
# is recorded this often.
PARTIAL_SECONDS = 0.1
PARTIAL_BYTES = 1 << 16
NO_RANK = "-"
# A crash dump lists the stacks of many threads.
LAST = 1 << 15


class PartialLine:
    """The beginning of a line whose end has not arrived yet."""

    def __init__(self) -> None:
        self.data = b""
        self.since = 0.0
        # The last bytes written before this line: a secret may begin in them.
        self.written = b""


class JobLog:
    def __init__(self, log: str, ranks: str, before: int = 0, secrets: Sequence[str] = ()) -> None:
        self.log = files.open_to_append(log)
        self.ranks = files.open_to_append(ranks)
        self.mask = hiding.Mask(secrets)
        # The head's copy of the log begins with this many bytes of earlier attempts.
        self.before = before
        self.size = os.fstat(self.log).st_size
        # The stream and the time in the last record.
        self.stream, self.stamped = "", 0.0
        self.partials: dict[str, PartialLine] = {}
        # The last output of each stream.
        self.last: dict[str, bytes] = {}
        # The part of a `ranks` record that could not be written because the disk was full.
        self.record = b""
        # The number of bytes dropped because the disk was full.
        self.lost = 0
        self.trouble = ""

    def feed(self, stream: str, data: bytes) -> bool:
        """Add output of a stream; return True if the log file has grown."""
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
        # A line that only grows (dots, a progress bar) is timed from its beginning.
        if end or not begun:
            partial.since = time.monotonic()
        return self.size > before

    def note(self, line: bytes) -> None:
        """Write a line of this program, which does not count as a rank's last output."""
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
                # The bytes held back may be the beginning of a secret.
                end = len(partial.data) - held
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
        """Append if possible; after an error the job goes on, and the gap is reported later."""
        if self.lost:
            notice = f"\norchestrator: {self.lost} bytes of output were lost here: {self.trouble}\n"
            if self._append(stream, memoryview(notice.encode())) < len(notice.encode()):
                self.lost += len(data)
                return
            self.lost = 0
        self.lost += len(data) - self._append(stream, data)

    def _append(self, stream: str, data: memoryview) -> int:
        """Append bytes, after their record in `ranks`; return how many were written."""
        try:
            self._write_record()
            # The clock may be set back.
            if stream != self.stream or abs(time.time() - self.stamped) >= PARTIAL_SECONDS:
                self.stream, self.stamped = stream, time.time()
                self.record = b"%d %s %.2f\n" % (
                    self.before + self.size,
                    stream.encode(),
                    self.stamped,
                )
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
# A limit of the reads from one output, as its process may print faster than it is read.
MOST_READS = 64


class RankOutputs:
    """Reads the output of a job's processes, and writes it to the job's log."""

    def __init__(
        self, loop: EventLoop, log: JobLog, named: Callable[[str], str], notify: Callable[[], None]
    ) -> None:
        """`named` returns the name in the log for a stream's present output."""
        self.loop, self.log, self.named, self.notify = loop, log, named, notify
        # Stream by file descriptor.
        self.streams: dict[int, str] = {}

    def watch(self, fd: int, stream: str) -> None:
        self.streams[fd] = stream
        self.loop.watch(fd, lambda: self.read(fd))

    def of(self, stream: str) -> list[int]:
        return [fd for fd, name in self.streams.items() if name == stream]

    def read(self, fd: int) -> bool:
        """Read once; return True if there was output."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.loop.unwatch(fd)
            del self.streams[fd]
            return False
        if self.log.feed(self.named(self.streams[fd]), data):
            self.notify()
        return True

    def drain(self, stream: str = "") -> None:
        """Read the output so far, of one stream or all; a survivor may never stop printing."""
        for fd in self.of(stream) if stream else list(self.streams):
            for _ in range(MOST_READS):
                if not has_bytes(fd) or not self.read(fd):
                    break

    def note(self, data: bytes) -> None:
        """Write a line of this program into the log."""
        self.log.note(data)
        self.notify()

    def flush(self) -> float:
        """Write unfinished lines that are due; return the seconds until the next one is."""
        before = self.log.size
        due = self.log.flush()
        if self.log.size > before:
            self.notify()
        return 60.0 if due is None else due


def has_bytes(fd: int) -> bool:
    """Return True if there is something to read; end of file does not count."""
    return fcntl.ioctl(fd, termios.FIONREAD, bytes(4)) != bytes(4)


def open_fifo(path: str) -> int:
    os.mkfifo(path, 0o600)
    # Opened for reading and writing, so that open() does not block and a closing writer is no EOF.
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    # The user's limit for pipe buffers may be reached; the default of 64 KiB works as well.
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, F_SETPIPE_SZ, READ_BYTES)
    return fd
