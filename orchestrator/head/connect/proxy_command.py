"""The user's ProxyCommand: a program whose standard streams lead to a machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile

from orchestrator.common import interrupt
from orchestrator.common.errors import NodeError


class ProxyCommand:
    """A running ProxyCommand, with the part of a socket's interface that paramiko uses."""

    def __init__(self, command: str) -> None:
        self.command = command
        ours, theirs = socket.socketpair()
        shell = os.environ.get("SHELL") or "/bin/sh"  # as ssh chooses it
        # Like any program behind a connection it may complain at any time: not to our terminal.
        self.complaints = tempfile.TemporaryFile()  # noqa: SIM115  closed with the connection
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [shell, "-c", f"exec {command}"],  # the user's own config
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self.complaints,
                    start_new_session=True,
                )
            except OSError as error:
                raise NodeError(f"{shell} cannot run its ProxyCommand: {error.strerror}") from error
        self.sock = ours
        self.settimeout, self.send, self.recv = ours.settimeout, ours.send, ours.recv
        interrupt.before_exit(self.hang_up)

    @property
    def _closed(self) -> bool:  # paramiko looks at this of a socket
        return self.sock.fileno() == -1

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # a reader wakes up
        self.sock.close()
        self.hang_up()

    def refuse_failed(self) -> None:
        """Raise if the command failed by itself, after its streams were closed."""
        code = self.process.wait()
        if code in (0, -signal.SIGHUP):
            return  # what it leads to hung up
        size = os.fstat(self.complaints.fileno()).st_size
        data = os.pread(self.complaints.fileno(), 300, max(0, size - 300))
        last_words = " ".join(data.decode(errors="replace").split())
        raise NodeError(
            f"its ProxyCommand ends with exit code {code}{last_words and ': ' + last_words}",
            f"try it: {self.command}",
        )

    def hang_up(self) -> None:
        """Send SIGHUP, as ssh does: a command that waits for something else would stay behind."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGHUP)
