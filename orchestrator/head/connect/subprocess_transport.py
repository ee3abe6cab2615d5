"""Reaches nodes through a program's pipes: ssh, srun, or a shell on this machine.

The program at the other end is the same as over SSH.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.connect.way import Way

HERE = Way("local", "a shell on this machine")


class LocalTransport:
    """Reach this machine, without any network."""

    timeout = 10.0

    def host_of(self, node: Login) -> str:
        return node.host

    def connect(self, node: Login, timeout: float | None = None) -> ProcessConnection:
        return ProcessConnection((), "")


class ProcessConnection:
    """A connection to a node by a local program: every command is a process of its own."""

    # The shell that srun starts on the node; empty for ssh, where sshd starts the login shell.
    shell: tuple[str, ...] = ("/bin/sh", "-c")

    def __init__(self, program: tuple[str, ...], address: str, way: Way = HERE) -> None:
        self.program = program
        self.address = address
        self.way = way
        self.open: list[ProcessChannel] = []

    def run(self, command: str, timeout: float) -> ProcessChannel:
        (ours, theirs), (complaints, stderr) = socket.socketpair(), socket.socketpair()
        with theirs, stderr:
            try:
                process = subprocess.Popen(
                    [*self.program, *self.shell, command],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=stderr.fileno(),
                    env=self.environment(),
                    # An srun holds its step, and so the job on its node: neither Ctrl-C nor our
                    # own end may reach it.
                    start_new_session=True,
                )
            except OSError as error:
                raise NodeError(f"{self.program[0]} cannot be started: {error.strerror}") from error
        self.open.append(self.channel(ours, complaints, process))
        self.open[-1].settimeout(timeout)
        return self.open[-1]

    def channel(
        self, both: socket.socket, stderr: socket.socket, process: subprocess.Popen[bytes]
    ) -> ProcessChannel:
        return ProcessChannel(both, stderr, process)

    def environment(self) -> dict[str, str] | None:
        # The process inherits our environment.
        return None

    @property
    def alive(self) -> bool:
        return True

    def close(self) -> None:
        for pipes in self.open:
            pipes.close()


class ProcessChannel:
    """A running program's standard streams, with the interface of paramiko's channel."""

    def __init__(
        self, both: socket.socket, stderr: socket.socket, process: subprocess.Popen[bytes]
    ) -> None:
        self.both = both
        self.stderr = stderr
        self.process = process
        # The exit code, once the process has ended.
        self.code: int | None = None
        # poll(), as select() fails with descriptors from 1024 on.
        self.looks = select.poll()
        self.looks.register(stderr, select.POLLIN)
        self.settimeout, self.sendall = both.settimeout, both.sendall

    def recv(self, nbytes: int, /) -> bytes:
        try:
            return self.both.recv(nbytes)
        except ConnectionResetError:
            # The program left input unread; its output can still be read.
            return self.both.recv(nbytes)

    def recv_stderr_ready(self) -> bool:
        return bool(self.looks.poll(0))

    def recv_stderr(self, nbytes: int, /) -> bytes:
        return self.stderr.recv(nbytes)

    def shutdown_write(self) -> None:
        self.both.shutdown(socket.SHUT_WR)

    def recv_exit_status(self) -> int:
        self.code = max(-1, self.process.wait())
        return self.code

    def close(self) -> None:
        """Close both ends: the program sees the end of its input, and a reader here wakes up."""
        for end in (self.both, self.stderr):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
