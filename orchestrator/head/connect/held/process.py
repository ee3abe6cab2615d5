"""The process that holds SSH connections open between commands.

It connects to what it was asked to hold, and to nothing else. A command gets a session on such a
connection if a new one would lead to the same machine now: by the same resolved ssh_config and
keys, by the address of each name and by the known_hosts of this moment. What passes through is
copied, both ways.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.common import files, interrupt
from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.head.connect import fleet, host_keys, ssh_config, tasks
from orchestrator.head.connect.held import wire
from orchestrator.head.connect.held.control import PATIENCE_SECONDS
from orchestrator.head.connect.held.transport import LOST
from orchestrator.head.connect.host_keys import paramiko
from orchestrator.head.connect.ssh import (
    WINDOW_BYTES,
    Connection,
    SshTransport,
    addresses_of,
    load_key,
)
from orchestrator.head.connect.ssh_config import KnownHops, Route, SshConfig
from orchestrator.head.connect.transport import notice_loss

TICK_SECONDS = 0.5  # between two checks of whether it is still of use
FIRST_SECONDS = 30.0  # until it has heard what to hold
LOST_AFTER_SECONDS = 45.0  # without an answer of the node's TCP
WAITING = 256  # commands that ask at the same moment: one for each node
READ_BYTES = 1 << 20  # paramiko moves all that it keeps to the front after every read: read much
WRITE_BYTES = 1 << 18  # and copies what is left after every 32 KB
PROGRAM = wire.program()

BY_SSH = "your own ssh's"


@dataclass
class Entry:
    """A connection to be held."""

    route: Route
    strict: bool
    timeout: float
    connection: Connection | None = None
    connecting: bool = False
    why: str = ""  # it is lost
    sessions: int = 0

    @property
    def alive(self) -> bool:
        return self.connection is not None and self.connection.alive

    @property
    def is_elsewhere(self) -> bool:
        """Tell whether the user's own ssh holds it, or a connection on the way there."""
        return any(hop.is_open for hop in self.route.hops)

    def described(self) -> dict[str, Any]:
        there = self.route.destination
        state = "open" if self.alive else "connecting" * self.connecting or "lost"
        if state == "lost" and self.is_elsewhere:
            state = BY_SSH
        return {
            "node": f"{there.user}@{there.host}:{there.port}",
            "state": state,
            "why": {"open": "", BY_SSH: "commands go by it"}.get(state, self.why),
            "sessions": self.sessions,
        }


@dataclass
class HeldConnections:
    """Holds connections, and answers commands until nothing is left to hold."""

    listener: socket.socket
    path: Path
    lock: int
    idle: float
    patience: float  # with a node: one that needs longer is no faster than a login
    entries: dict[str, Entry] = field(default_factory=dict)
    ways: dict[Any, SshTransport] = field(default_factory=dict)  # each with its jump hosts
    changing: threading.RLock = field(default_factory=threading.RLock)
    used: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.inode = self.path.stat().st_ino

    def serve(self) -> None:
        """Answer until there is a reason to end."""
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        checked = time.monotonic()
        while True:
            if poll.poll(TICK_SECONDS * 1000):
                try:
                    sock, _ = self.listener.accept()
                except OSError:  # too many open files: the command logs in by itself
                    time.sleep(0.1)
                    continue
                tasks.STREAMS.start(partial(self.answer, tasks.Socket.of(sock)))
            if time.monotonic() - checked >= TICK_SECONDS:
                checked = time.monotonic()
                if self.is_over():
                    return

    def is_over(self) -> bool:
        """Tell whether nobody uses it, nothing is left to hold, or another is in its place."""
        with self.changing:
            entries = list(self.entries.values())
            if any(entry.sessions for entry in entries):
                self.used = time.monotonic()
                if not self.is_current():
                    self.retire()
                return False
        useful = any(entry.alive or entry.connecting for entry in entries)
        waited = time.monotonic() - self.used
        if waited > (self.idle if useful else TICK_SECONDS if entries else FIRST_SECONDS):
            return True
        return not self.is_current()

    def is_current(self) -> bool:
        """Tell whether our socket is still there, and our program is still the installed one."""
        wire.program.cache_clear()
        try:
            return self.path.stat().st_ino == self.inode and wire.program() == PROGRAM
        except OSError:
            return False

    def retire(self) -> None:
        """Give the place to another, and end when the commands that run now have ended."""
        self.remove_socket()
        with contextlib.suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_UN)

    def end(self) -> NoReturn:
        self.remove_socket()
        interrupt.leave(0)

    def remove_socket(self) -> None:
        """Remove our socket, and no other that has taken its place."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self.inode:
                self.path.unlink()

    # -- what commands ask -------------------------------------------------------------------

    def answer(self, sock: socket.socket) -> None:
        """Answer a command of the same user."""
        with sock, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if wire.peer(sock)[1] == os.geteuid():
                self.converse(sock)

    def converse(self, sock: socket.socket) -> None:
        """Answer until the command hangs up, has run, or asks what is no question."""
        while True:
            request, _ = wire.receive(sock)
            do = request.get("do")
            if do == "end":
                self.end()
            elif do == "retire":
                self.retire()
                wire.send(sock, {"retired": True})
            elif do == "list":
                wire.send(sock, self.state())
            elif request.get("program") != PROGRAM:
                return
            elif do == "hold":
                # An ssh_config may have commands run (Match exec).
                keys = tasks.aside(partial(self.hold, request), PATIENCE_SECONDS)
                wire.send(sock, self.state(keys))
            elif do == "session":
                self.run_in_session(sock, request)
                return
            else:
                return

    def state(self, wanted: Collection[str] | None = None) -> dict[str, Any]:
        """Describe all connections, or those with these keys."""
        with self.changing:
            keys = self.entries if wanted is None else wanted
            return {"idle": self.idle, "connections": [self.entries[k].described() for k in keys]}

    def hold(self, request: dict[str, Any]) -> list[str]:
        """Connect to what is not connected yet, and keep that up; return the keys of the routes."""
        self.idle, self.used = float(request["idle"]), time.monotonic()
        if request["agent"]:
            os.environ["SSH_AUTH_SOCK"] = request["agent"]
        ssh_config.read_again()
        config = SshConfig(Path(request["ssh_config"]) if request["ssh_config"] else None)
        keys = []
        for host, user, port in request["nodes"]:
            route = config.route_to(config.destination(host, user, port))
            if route is None:
                continue
            fresh = Entry(route, bool(request["strict"]), float(request["timeout"]))
            with self.changing:
                entry = self.entries.setdefault(route.key, fresh)
            keys.append(route.key)
            self.connect(entry)
        return keys

    # -- connections -------------------------------------------------------------------------

    def connect(self, entry: Entry) -> None:
        """Connect in the background, unless there is a connection, or one on its way."""
        with self.changing:
            if entry.connecting or entry.alive or entry.is_elsewhere:
                return
            entry.connecting = True
            load_key.cache_clear()
            hops = entry.route.hops
            jumps = (hops[0].jump, hops[1:], entry.strict)
            way = self.ways.get(jumps)
            if way is None:
                way = SshTransport(KnownHops(hops=hops), strict=entry.strict)
                self.ways[jumps] = way
        tasks.WORK.start(partial(self._connect, entry, way))

    def _connect(self, entry: Entry, way: SshTransport) -> None:
        try:
            connection = way.connect(entry.route.destination, entry.timeout)
            notice_loss(connection, LOST_AFTER_SECONDS)
            entry.connection, entry.why = connection, ""
        except OrchestratorError as error:
            entry.why = error.what
        except Exception as error:  # noqa: BLE001  a defect of ours: commands log in by themselves
            entry.why = f"{type(error).__name__}: {error}"
        finally:
            entry.connecting = False

    def open_session(self, key: str, *, strict: bool) -> tuple[Entry, str, paramiko.Channel] | None:
        """Open a session for a command, if its node may still be trusted and answers."""
        self.used = time.monotonic()
        entry = self.entries.get(key)
        connection = entry.connection if entry else None
        if entry is None or connection is None:
            return None
        if not connection.alive:
            self.connect(entry)
            return None
        try:
            trust(entry.route, connection, strict=strict)
        except OrchestratorError as error:  # the command meets it in a login of its own
            self.drop(entry, connection, error.what, whole_way=True)
            return None
        try:
            channel = connection.transport.open_session(WINDOW_BYTES, timeout=self.patience)
        except paramiko.ChannelException:  # MaxSessions: others are using it
            return None
        except Exception as error:  # noqa: BLE001  whatever a lost connection does to paramiko
            self.drop(entry, connection, str(error))
            self.connect(entry)
            return None
        return entry, connection.address, channel

    def drop(
        self, entry: Entry, connection: Connection, reason: str, *, whole_way: bool = False
    ) -> None:
        with self.changing:
            if entry.connection is connection:
                entry.connection, entry.why = None, reason
        link: Connection | None = connection
        while link is not None:
            link.close()
            link = link.through if whole_way else None

    # -- the sessions of commands --------------------------------------------------------------

    def run_in_session(self, sock: socket.socket, request: dict[str, Any]) -> None:
        """Open a session, and run there what the command asks for next."""
        session = self.open_session(request["key"], strict=request["strict"])
        if session is None:
            wire.send(sock, {"open": False})
            return
        entry, address, channel = session
        with contextlib.closing(channel):
            wire.send(sock, {"open": True, "address": address})
            wanted, passed = wire.receive(sock)
            with contextlib.ExitStack() as opened:
                plain = [opened.enter_context(socket.socket(fileno=fd)) for fd in passed]
                ends = [opened.enter_context(tasks.Socket.of(end)) for end in plain]
                if wanted.get("do") != "run" or len(ends) != 2:
                    return
                try:
                    channel.settimeout(entry.timeout)
                    channel.exec_command(wanted["command"])
                except (paramiko.SSHException, EOFError, OSError) as error:
                    wire.send(sock, {"runs": False, "error": str(error)})
                    return
                self.count(entry, 1)
                try:
                    wire.send(sock, {"runs": True})
                    copy_streams(channel, sock, *ends)
                finally:
                    self.count(entry, -1)

    def count(self, entry: Entry, sessions: int) -> None:
        with self.changing:
            entry.sessions += sessions


def trust(route: Route, connection: Connection, *, strict: bool) -> None:
    """Raise if a new connection would be refused, or would lead elsewhere now, on any hop."""
    link: Connection | None = connection
    for hop in route.hops:
        assert link is not None
        if link.address and link.address not in addresses_of(hop):
            raise NodeError(f"{hop.host} is not at {link.address} any more")
        key = link.transport.get_remote_server_key()
        host_keys.check(hop, key, strict=strict, address=link.address)
        link = link.through


# -- the streams of a program ---------------------------------------------------------------------


def copy_streams(
    channel: paramiko.Channel, sock: socket.socket, both: socket.socket, stderr: socket.socket
) -> None:
    """Copy until the program is over, or the command is gone.

    A task for each stream, which waits where the reader is slow: so does then the program, as it
    would without a process between. A stream that ends, ends at the other end.
    """
    channel.settimeout(None)
    both.settimeout(None)
    sock.settimeout(None)

    def bring_input() -> None:
        buffer = bytearray(WRITE_BYTES)
        with contextlib.suppress(OSError, paramiko.SSHException):
            while size := both.recv_into(buffer):
                channel.sendall(memoryview(buffer)[:size].tobytes())
            channel.shutdown_write()
        tasks.ready(sock.fileno(), 0, None)  # the command closes it last: input may end before it
        channel.close()
        hang_up(stderr, socket.SHUT_RDWR)  # a writer there may wait for the command

    inward = tasks.STREAMS.start(bring_input)
    errors = tasks.STREAMS.start(lambda: copy(channel.recv_stderr, stderr))
    copy(channel.recv, both)
    errors.join()
    code = channel.recv_exit_status()
    if code < 0 and not channel.get_transport().is_active():
        code = LOST
    with contextlib.suppress(OSError):
        wire.send(sock, {"code": code})
    hang_up(both, socket.SHUT_RDWR)
    hang_up(sock, socket.SHUT_RDWR)
    inward.join()


def copy(receive: Callable[[int], bytes], there: socket.socket) -> None:
    """Copy until the source ends or nobody reads."""
    with contextlib.suppress(OSError):
        while data := receive(READ_BYTES):
            there.sendall(data)
    hang_up(there, socket.SHUT_WR)


def hang_up(end: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(how)


# -- the process ----------------------------------------------------------------------------------


def hold_connections(idle: float, ready: Callable[[], None], patience: float) -> None:
    """Hold connections until there is a reason to end; nothing happens if somebody does already."""
    with lock() as held, wire.entered() as here:
        name = Path(here, wire.name())
        with contextlib.suppress(FileNotFoundError):
            name.unlink()  # of a process that was killed
        listener = socket.socket(socket.AF_UNIX)
        with files.making_sockets():
            listener.bind(str(name))
        listener.listen(WAITING)
        path = wire.directory() / wire.name()
        fleet.raise_limit()
        # Sessions block nowhere. In other threads than what reads the connections they would be
        # woken across at each packet: 50 switches a session, and half as much processor again.
        tasks.STREAMS.most = 1
        holder = HeldConnections(listener, path, held, idle, patience)
        interrupt.undo_with(holder.remove_socket)
        ready()
        holder.serve()
        holder.remove_socket()


@contextlib.contextmanager
def lock() -> Iterator[int]:
    """Be the only process that holds connections: of this user, on this machine."""
    where = wire.directory()
    where.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        files.make_private(where)
    with wire.entered() as here:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(f"{here}/{wire.name()}.lock", flags, files.PRIVATE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)
