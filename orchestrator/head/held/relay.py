"""Copy the streams of a program on a node to the command that started it, and back.

A thread for each stream, which waits where the reader is slow: so does then the program, as it
would without a process between. A stream that ends, ends at the other end.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable

from orchestrator.head.connect.light_paramiko import paramiko
from orchestrator.head.held.transport import LOST, STATUS

READ = 1 << 20  # paramiko moves all that it keeps to the front after every read: read much
WRITE = 1 << 18  # and copies what is left after every 32 KB


class Relay:
    """One program's streams."""

    def __init__(
        self,
        channel: paramiko.Channel,
        both: socket.socket,
        stderr: socket.socket,
        status: socket.socket,
    ) -> None:
        self.channel = channel
        self.both = both
        self.stderr = stderr
        self.status = status

    def run(self) -> None:
        """Copy until the program is over, or the command is gone."""
        self.channel.settimeout(None)
        self.both.settimeout(None)
        inward = threading.Thread(target=self.bring_input, daemon=True)
        errors = threading.Thread(target=self.bring_errors, daemon=True)
        inward.start()
        errors.start()
        copy(self.channel.recv, self.both)
        hang_up(self.both, socket.SHUT_WR)
        errors.join()
        code = self.channel.recv_exit_status()
        if code < 0 and not self.channel.get_transport().is_active():
            code = LOST
        with contextlib.suppress(OSError):
            self.status.sendall(STATUS.pack(code))
        hang_up(self.both, socket.SHUT_RDWR)
        hang_up(self.status, socket.SHUT_RDWR)
        inward.join()

    def bring_input(self) -> None:
        """Copy what the command writes, and close the session once the command is gone."""
        buffer = bytearray(WRITE)
        with contextlib.suppress(OSError, paramiko.SSHException):
            while size := self.both.recv_into(buffer):
                self.channel.sendall(memoryview(buffer)[:size].tobytes())
            self.channel.shutdown_write()
        poll = select.poll()
        poll.register(self.status, 0)  # which the command closes last: input may end before it
        poll.poll()
        self.channel.close()
        hang_up(self.stderr, socket.SHUT_RDWR)  # a writer there may wait for the command

    def bring_errors(self) -> None:
        copy(self.channel.recv_stderr, self.stderr)
        hang_up(self.stderr, socket.SHUT_WR)


def copy(receive: Callable[[int], bytes], there: socket.socket) -> None:
    """Copy until the source ends or nobody reads."""
    with contextlib.suppress(OSError):
        while data := receive(READ):
            there.sendall(data)


def hang_up(end: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(how)
