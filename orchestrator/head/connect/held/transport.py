"""Reach nodes by SSH: over connections that are held open where there are such, else over new ones.

Nothing waits for the process that holds them longer than a moment. Where it has no connection, or
one that does not work any more, the command logs in by itself, as it would without.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import tasks
from orchestrator.head.connect.held import wire
from orchestrator.head.connect.ssh_config import Destination, OnlySsh, SshConfig
from orchestrator.head.connect.subprocess_transport import by_ssh
from orchestrator.head.connect.transport import Channel, Connection, readable

if TYPE_CHECKING:
    from orchestrator.head.connect.ssh import SshTransport

PATIENCE_SECONDS = 3.0  # with the process that holds the connections; it gives a node two
LOST = -2  # the exit status of a command whose connection broke


class HeldTransport:
    """The way of every command to nodes that are reached by SSH."""

    def __init__(self, config: SshConfig, *, timeout: float = 10.0, strict: bool = False) -> None:
        self.config = config
        self.timeout = timeout
        self.strict = strict
        self.loading = threading.Lock()  # paramiko is loaded once, by the first that needs it
        self.ssh: SshTransport | None = None
        self.heard = 0.0  # when the process that holds connections last answered

    def connect(self, destination: Destination, timeout: float | None = None) -> Connection:
        seconds = timeout or self.timeout
        session = self.session(destination)
        if session is None:
            return self.login(destination, seconds)
        return HeldConnection(self, destination, seconds, *session)

    def session(self, destination: Destination) -> tuple[socket.socket, str] | None:
        """Ask for a session on a connection that is open, and for the node's address there."""
        sock = wire.call()
        if sock is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            sock.settimeout(PATIENCE_SECONDS)
            route = self.config.route_to(destination)
            if route is not None:
                request = {"do": "session", "key": route.key, "strict": self.strict}
                wire.send(sock, {"program": wire.program(), **request})
                answer = wire.receive(sock)[0] if self.hears(sock) else {}
                if answer.get("open"):
                    return sock, str(answer.get("address", ""))
        sock.close()
        return None

    def hears(self, sock: tasks.Socket) -> bool:
        """Wait for an answer; while others come, that process is busy and does not hang."""
        while True:
            began = time.monotonic()
            if tasks.ready(sock.fileno(), select.EPOLLIN, PATIENCE_SECONDS):
                self.heard = time.monotonic()
                return True
            if self.heard < began:
                return False

    def login(self, destination: Destination, timeout: float) -> Connection:
        """Log in anew, or go by what the user's own ssh has open, or alone can do."""
        if self.config.is_open(destination) and (own := self.by_ssh(destination, timeout)):
            return own
        try:
            return self.paramiko(destination, timeout)
        except OnlySsh as error:
            own = self.by_ssh(destination, timeout, error)
            if own is None:
                raise
            return own

    def by_ssh(
        self, destination: Destination, timeout: float, error: NodeError | None = None
    ) -> Connection | None:
        return by_ssh(destination, self.config.file, timeout, strict=self.strict, error=error)

    def paramiko(self, destination: Destination, timeout: float) -> Connection:
        with self.loading:
            if self.ssh is None:
                from orchestrator.head.connect.ssh import SshTransport  # paramiko takes 100 ms

                self.ssh = SshTransport(self.config, timeout=self.timeout, strict=self.strict)
        return self.ssh.connect(destination, timeout)


class HeldConnection:
    """A node whose connection another process has.

    Each session there was opened, which took an answer of the node, before it is used here. Only
    then is a command sent: it never runs twice.
    """

    def __init__(
        self,
        transport: HeldTransport,
        destination: Destination,
        timeout: float,
        session: socket.socket,
        address: str,
    ) -> None:
        self.transport = transport
        self.destination = destination
        self.timeout = timeout
        self.address = address
        self.unused: socket.socket | None = session
        self.channels: list[HeldChannel] = []
        self.new: Connection | None = None

    def run(self, command: str, timeout: float) -> Channel:
        """Start a command; the caller reads and writes the channel."""
        session, self.unused = self.unused, None
        if session is None and self.new is None:  # its first session has a command already
            again = self.transport.session(self.destination)
            session = again[0] if again else None
        if session is not None:
            self.channels.append(start(session, command, timeout))
            return self.channels[-1]
        if self.new is None:
            self.new = self.transport.login(self.destination, self.timeout)
        return self.new.run(command, timeout)

    @property
    def alive(self) -> bool:
        held = not any(channel.lost for channel in self.channels)
        return held and (self.new is None or self.new.alive)

    def close(self) -> None:
        if self.unused is not None:
            self.unused.close()
        for channel in self.channels:
            channel.close()
        if self.new is not None:
            self.new.close()


def start(session: socket.socket, command: str, timeout: float) -> HeldChannel:
    """Start a command in a session, and pass on the other ends of its streams."""
    (both, both_there), (stderr, stderr_there) = socket.socketpair(), socket.socketpair()
    session.settimeout(timeout)
    with both_there, stderr_there:
        ends = both_there.fileno(), stderr_there.fileno()
        try:
            answer = wire.ask(session, {"do": "run", "command": command}, *ends)
        except (OSError, ValueError) as error:
            answer = {"error": str(error)}
    if answer.get("runs"):
        session.settimeout(None)
        return HeldChannel(session, tasks.Socket.of(both), tasks.Socket.of(stderr))
    for end in (session, both, stderr):
        end.close()
    raise NodeError(
        "it lets us in, but no command can be started there "
        f"({answer.get('error', 'the connection broke')})",
        "check MaxSessions in its sshd_config and the login shell of this user",
    )


class HeldChannel:
    """The streams of a program on a node, which pass through the process with its connection."""

    def __init__(self, session: socket.socket, both: socket.socket, stderr: socket.socket) -> None:
        self.session = session  # says in the end how the program ended
        self.both = both
        self.stderr = stderr
        self.lost = False
        self.settimeout, self.sendall = both.settimeout, both.sendall

    def recv(self, nbytes: int, /) -> bytes:
        try:
            return self.both.recv(nbytes)
        except ConnectionResetError:  # it is gone, and has not read all that we sent
            return b""

    def recv_stderr_ready(self) -> bool:
        return readable(self.stderr)

    def recv_stderr(self, nbytes: int, /) -> bytes:
        return self.stderr.recv(nbytes)

    def recv_exit_status(self) -> int:
        """Wait for the exit status; -1 if none came, because of a signal or a lost connection."""
        try:
            code = int(wire.receive(self.session)[0].get("code", LOST))
        except (OSError, ValueError):
            code = LOST
        self.lost = code == LOST
        return max(-1, code)

    def shutdown_write(self) -> None:
        """End the program's input."""
        with contextlib.suppress(OSError):  # it is gone
            self.both.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close every stream: the program sees the end of its input, and a reader here wakes up."""
        for end in (self.both, self.stderr, self.session):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        """Free the descriptors now that no thread can be reading: their numbers are given again."""
        for end in (self.both, self.stderr, self.session):
            end.close()
