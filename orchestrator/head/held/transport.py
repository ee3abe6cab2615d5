"""Reach nodes by SSH: over connections that are held open where there are such, else over new ones.

Nothing waits for the process that holds them longer than a moment. Where it has no connection, or
one that does not work any more, the command logs in by itself, as it would without.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import server_command
from orchestrator.head.connect.ssh_config import Destination, SshConfig
from orchestrator.head.connect.transport import Channel, Connection, readable
from orchestrator.head.held import socket_file
from orchestrator.head.held.route import route_to
from orchestrator.head.nodes.environment import Environment

if TYPE_CHECKING:
    from orchestrator.head.connect.ssh import SshTransport

PATIENCE = 3.0  # with the process that holds the connections; it gives a node two seconds
STATUS = struct.Struct(">i")  # the exit status of a command,
LOST = -2  # or that its connection broke


class HeldTransport:
    """The way of every command to nodes that are reached by SSH."""

    def __init__(
        self,
        config: SshConfig,
        *,
        timeout: float = 10.0,
        strict: bool = False,
        ready_servers: bool = True,
    ) -> None:
        self.config = config
        self.timeout = timeout
        self.strict = strict
        self.ready_servers = ready_servers  # take those that were started before
        self.loading = threading.Lock()  # paramiko is loaded once, by the first that needs it
        self.ssh: SshTransport | None = None

    def connect(self, destination: Destination, timeout: float | None = None) -> Connection:
        seconds = timeout or self.timeout
        session = self.ask(destination)
        if session is None:
            return self.login(destination, seconds)
        return HeldConnection(self, destination, seconds, session)

    def ask(self, destination: Destination) -> Session | None:
        """Ask for a session on a connection that is open already."""
        sock = socket_file.call()
        if sock is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            sock.settimeout(PATIENCE)
            route = route_to(self.config, destination)
            if route is not None:
                answer = ask(sock, {"do": "session", "key": route.key, "strict": self.strict})
                if answer.get("open"):
                    return Session(sock, str(answer.get("address", "")))
        sock.close()
        return None

    def login(self, destination: Destination, timeout: float) -> Connection:
        with self.loading:
            if self.ssh is None:
                from orchestrator.head.connect.ssh import SshTransport  # paramiko takes 100 ms

                self.ssh = SshTransport(self.config, timeout=self.timeout, strict=self.strict)
        return self.ssh.connect(destination, timeout)


def ask(sock: socket.socket, request: dict[str, Any], *passed: int) -> dict[str, Any]:
    """Ask the process that holds the connections; {} if it is gone, or runs another program."""
    socket_file.send(sock, {"program": socket_file.program(), **request}, passed)
    answer, files = socket_file.receive(sock)
    for descriptor in files:
        os.close(descriptor)
    return answer


def server_like(environment: Environment) -> dict[str, Any]:
    """Describe a server as this command would start it."""
    from orchestrator.head.connect.channel import edition  # exec does without the protocol: 15 ms

    choice = {"pythons": server_command.pythons(environment), "edition": edition()}
    return {"environment": asdict(environment), **choice}


@dataclass(frozen=True)
class Session:
    """A session that is open on a node and has no command yet."""

    sock: socket.socket
    address: str

    def run(self, command: str, timeout: float) -> HeldChannel:
        answer = self.ask_for_streams({"do": "run", "command": command}, timeout)
        if isinstance(answer, HeldChannel):
            return answer
        self.sock.close()
        raise NodeError(
            "it lets us in, but no command can be started there "
            f"({answer.get('error', 'the connection broke')})",
            "check MaxSessions in its sshd_config and the login shell of this user",
        )

    def server(self, environment: Environment) -> HeldChannel | None:
        request = {"do": "server", **server_like(environment)}
        answer = self.ask_for_streams(request, PATIENCE)
        return answer if isinstance(answer, HeldChannel) else None

    def ask_for_streams(
        self, request: dict[str, Any], timeout: float
    ) -> HeldChannel | dict[str, Any]:
        """Pass on the other ends of the streams, or return the answer that refuses them."""
        stderr, stderr_there = socket.socketpair()
        status, status_there = socket.socketpair()
        self.sock.settimeout(timeout)
        with stderr_there, status_there:
            passed = stderr_there.fileno(), status_there.fileno()
            try:
                answer = ask(self.sock, request, *passed)
            except (OSError, ValueError) as error:
                answer = {"error": str(error)}
        if answer.get("runs"):
            return HeldChannel(self.sock, stderr, status)
        stderr.close()
        status.close()
        return answer


class HeldConnection:
    """A node whose connection another process has.

    Each session there was opened, which took an answer of the node, before it is used here. Only
    then is a command sent: it never runs twice.
    """

    def __init__(
        self, transport: HeldTransport, destination: Destination, timeout: float, session: Session
    ) -> None:
        self.transport = transport
        self.destination = destination
        self.timeout = timeout
        self.address = session.address
        self.session: Session | None = session
        self.channels: list[HeldChannel] = []
        self.new: Connection | None = None

    def run(self, command: str, timeout: float) -> Channel:
        """Start a command; the caller reads and writes the channel."""
        session, self.session = self.session, None
        if session is None and self.new is None:  # its first session has a command already
            session = self.transport.ask(self.destination)
        if session is not None:
            self.channels.append(session.run(command, timeout))
            return self.channels[-1]
        if self.new is None:
            self.new = self.transport.login(self.destination, self.timeout)
        return self.new.run(command, timeout)

    def server(self, environment: Environment) -> HeldChannel | None:
        """Take over a server that was started before."""
        if self.session is None or not self.transport.ready_servers:
            return None
        channel = self.session.server(environment)
        if channel is not None:
            self.session = None
            self.channels.append(channel)
        return channel

    @property
    def alive(self) -> bool:
        held = not any(channel.lost for channel in self.channels)
        return held and (self.new is None or self.new.alive)

    def close(self) -> None:
        if self.session is not None:
            self.session.sock.close()
        for channel in self.channels:
            channel.close()
        if self.new is not None:
            self.new.close()


class HeldChannel:
    """The streams of a program on a node, which pass through the process with its connection."""

    def __init__(self, both: socket.socket, stderr: socket.socket, status: socket.socket) -> None:
        self.both = both
        self.stderr = stderr
        self.status = status
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
            data = self.status.recv(STATUS.size)
        except OSError:
            data = b""
        code = int(STATUS.unpack(data)[0]) if len(data) == STATUS.size else LOST
        self.lost = code == LOST
        return max(-1, code)

    def shutdown_write(self) -> None:
        """End the program's input."""
        with contextlib.suppress(OSError):  # it is gone
            self.both.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close every stream: the program sees the end of its input, and a reader here wakes up."""
        for end in (self.both, self.stderr, self.status):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        """Free the descriptors now that no thread can be reading: their numbers are given again."""
        for end in (self.both, self.stderr, self.status):
            end.close()
