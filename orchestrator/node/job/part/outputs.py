"""Reads what the processes of a job print, and feeds the job's log with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import termios
from collections.abc import Callable

from orchestrator.common import files
from orchestrator.node.job.part.job_log import JobLog
from orchestrator.node.peers.peers import Loop

F_SETPIPE_SZ = 1031
READ_BYTES = 1 << 20
MOST_READS = 64  # of an output, where more may come than can be read


class Outputs:
    def __init__(
        self, loop: Loop, log: JobLog, named: Callable[[str], str], ring: Callable[[], None]
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
