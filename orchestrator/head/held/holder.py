"""The process that holds SSH connections open between commands.

It connects to what it was asked to hold, and to nothing else. A command gets a session on such a
connection if a new one would lead to the same machine now: by the same resolved ssh_config and
keys, and by the known_hosts of this moment. What passes through is copied, both ways.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.common import files, interrupt
from orchestrator.common.errors import OrchestratorError
from orchestrator.head.connect import host_keys, open_files
from orchestrator.head.connect.light_paramiko import paramiko
from orchestrator.head.connect.ssh import WINDOW, Connection, SshTransport, load_key
from orchestrator.head.connect.transport import notice_loss
from orchestrator.head.held import socket_file
from orchestrator.head.held.ready_server import ReadyServer, Wanted
from orchestrator.head.held.relay import Relay
from orchestrator.head.held.route import KnownHops, Route, from_data

TICK = 0.5  # between two looks at whether it is still of use
FIRST = 30.0  # seconds until it has heard what to hold
LOST_AFTER = 45.0  # seconds without an answer of the node's TCP
WAITING = 256  # commands that ask at the same moment: one for each node
PROGRAM = socket_file.program()


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
    wanted: Wanted | None = None  # the server that the next command probably wants,
    due: float = 0.0  # and when to start it
    starting: bool = False
    ready: ReadyServer | None = None

    @property
    def alive(self) -> bool:
        return self.connection is not None and self.connection.alive

    @property
    def name(self) -> str:
        there = self.route.destination
        return f"{there.user}@{there.host}:{there.port}"


@dataclass
class Holder:
    """Holds connections, and answers commands until nothing is left to hold."""

    listener: socket.socket
    path: Path
    lock: int
    idle: float
    patience: float  # with a node: one that needs longer is no faster than a login
    later: float  # when the next server is started after one was taken
    entries: dict[str, Entry] = field(default_factory=dict)
    ways: dict[Any, SshTransport] = field(default_factory=dict)  # each with its jump hosts
    changing: threading.RLock = field(default_factory=threading.RLock)
    used: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.inode = self.path.stat().st_ino
        threading.Thread(target=self.tend_servers, daemon=True).start()

    def serve(self) -> None:
        """Answer until there is a reason to end."""
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        looked = time.monotonic()
        while True:
            if poll.poll(TICK * 1000):
                try:
                    sock, _ = self.listener.accept()
                except OSError:  # too many open files: the command logs in by itself
                    time.sleep(0.1)
                    continue
                threading.Thread(target=self.answer, args=(sock,), daemon=True).start()
            if time.monotonic() - looked >= TICK:
                looked = time.monotonic()
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
        if waited > (self.idle if useful else TICK if entries else FIRST):
            return True
        return not self.is_current()

    def is_current(self) -> bool:
        """Tell whether our socket is still there, and our program is still the installed one."""
        socket_file.program.cache_clear()
        try:
            return self.path.stat().st_ino == self.inode and socket_file.program() == PROGRAM
        except OSError:
            return False

    def retire(self) -> None:
        """Give the place to another, and end when the commands that run now have ended."""
        self.remove_socket()
        with contextlib.suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_UN)

    # -- what commands ask -------------------------------------------------------------------

    def answer(self, sock: socket.socket) -> None:
        """Answer a command of the same user."""
        if socket_file.peer(sock)[1] != os.geteuid():
            sock.close()
            return
        with (
            sock,
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            contextlib.ExitStack() as opened,
        ):
            self.converse(sock, opened)

    def converse(self, sock: socket.socket, opened: contextlib.ExitStack) -> None:
        """Answer until the command ends the conversation, or something that is no question."""
        session: Session | None = None
        while True:
            request, passed = socket_file.receive(sock)
            ends = [socket.socket(fileno=descriptor) for descriptor in passed]
            do = request.get("do")
            if do == "end":
                self.end()
            elif do == "retire":
                self.retire()
                socket_file.send(sock, {"retired": True})
            elif do == "list":
                socket_file.send(sock, self.state())
            elif request.get("program") != PROGRAM:
                return
            elif do == "hold":
                self.hold(request)
                wanted = {item["key"] for item in request["routes"]}
                socket_file.send(sock, self.state(wanted))
            elif do == "session" and session is None:
                session = self.session(request["key"], strict=request["strict"])
                opened.callback(session.channel.close if session else bool)
                socket_file.send(sock, session.described if session else {"open": False})
            elif do == "server" and session is not None and len(ends) == 2:
                server = self.take_server(session.entry, Wanted.of(request))
                if server is not None:
                    session.hand_over(server, sock, ends)
                    return
                socket_file.send(sock, {"runs": False})
            elif do == "run" and session is not None and len(ends) == 2:
                session.run(sock, request["command"], ends)
                return
            else:
                return

    def state(self, wanted: Container[str] | None = None) -> dict[str, Any]:
        """Describe all connections, or those with these keys."""
        with self.changing:
            connections = [
                {
                    "node": entry.name,
                    "state": "open" if entry.alive else "connecting" * entry.connecting or "lost",
                    "why": "" if entry.alive else entry.why,
                    "sessions": entry.sessions,
                    "ready": entry.alive and entry.ready is not None,
                }
                for key, entry in self.entries.items()
                if wanted is None or key in wanted
            ]
        return {"idle": self.idle, "connections": connections}

    def hold(self, request: dict[str, Any]) -> None:
        """Connect to what is not connected yet, and keep that up."""
        self.idle, self.used = float(request["idle"]), time.monotonic()
        if request["agent"]:
            os.environ["SSH_AUTH_SOCK"] = request["agent"]
        for item in request["routes"]:
            with self.changing:
                entry = self.entries.get(item["key"])
                if entry is None:
                    route = from_data(item["route"])
                    entry = Entry(route, bool(item["strict"]), float(item["timeout"]))
                    self.entries[item["key"]] = entry
                if entry.wanted is None:
                    entry.wanted, entry.due = Wanted.of(item["server"]), 0.0
            self.connect(entry)

    def end(self) -> NoReturn:
        self.remove_socket()
        interrupt.leave(0)

    def remove_socket(self) -> None:
        """Remove our socket, and no other that has taken its place."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self.inode:
                self.path.unlink()

    # -- connections -------------------------------------------------------------------------

    def connect(self, entry: Entry) -> None:
        """Connect in the background, unless there is a connection, or one on its way."""
        with self.changing:
            if entry.connecting or entry.alive:
                return
            entry.connecting = True
            load_key.cache_clear()
            hops = entry.route.hops
            jumps = (hops[0].jump, hops[1:], entry.strict)
            way = self.ways.get(jumps)
            if way is None:
                way = SshTransport(KnownHops(hops=hops), strict=entry.strict)
                self.ways[jumps] = way
        threading.Thread(target=self._connect, args=(entry, way), daemon=True).start()

    def _connect(self, entry: Entry, way: SshTransport) -> None:
        try:
            connection = way.connect(entry.route.destination, entry.timeout)
            notice_loss(connection, LOST_AFTER)
            entry.connection, entry.why = connection, ""
        except OrchestratorError as error:
            entry.why = error.what
        except Exception as error:  # noqa: BLE001  a defect of ours: commands log in by themselves
            entry.why = f"{type(error).__name__}: {error}"
        finally:
            entry.connecting = False

    def session(self, key: str, *, strict: bool) -> Session | None:
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
        except OrchestratorError as error:  # the command will be told so, by a login of its own
            self.drop(entry, connection, error.what, whole_way=True)
            return None
        try:
            channel = connection.transport.open_session(WINDOW, timeout=self.patience)
        except paramiko.ChannelException:  # MaxSessions: others are using it
            return None
        except Exception as error:  # noqa: BLE001  whatever a lost connection does to paramiko
            self.drop(entry, connection, str(error))
            self.connect(entry)
            return None
        return Session(entry, channel, connection.address, self.changing)

    def drop(
        self, entry: Entry, connection: Connection, why: str, *, whole_way: bool = False
    ) -> None:
        with self.changing:
            if entry.connection is connection:
                entry.connection, entry.why = None, why
        link: Connection | None = connection
        while link is not None:
            link.close()
            link = link.through if whole_way else None

    # -- servers that are ready ----------------------------------------------------------------

    def tend_servers(self) -> None:
        """Keep a server ready on each connection, for as long as this process lives."""
        while True:
            time.sleep(TICK)
            with self.changing:
                entries = [entry for entry in self.entries.values() if entry.alive]
            for entry in entries:
                server, now = entry.ready, time.monotonic()
                if server is not None and not server.look(now):
                    self.forget(entry, server)
                with self.changing:
                    free = entry.ready is None and not entry.starting
                    if not (free and entry.wanted and now >= entry.due):
                        continue
                    entry.starting = True
                threading.Thread(target=self.start_server, args=(entry,), daemon=True).start()

    def start_server(self, entry: Entry) -> None:
        connection, wanted = entry.connection, entry.wanted
        server = None
        with contextlib.suppress(OrchestratorError, OSError):
            if connection is not None and wanted is not None:
                server = ReadyServer(connection, wanted, entry.timeout)
        with self.changing:
            entry.starting = False
            entry.ready = server
            if server is None and entry.wanted is wanted:
                entry.wanted = None  # until a command asks for it

    def forget(self, entry: Entry, server: ReadyServer) -> None:
        with self.changing:
            if entry.ready is server:
                entry.ready = None
        server.close()

    def take_server(self, entry: Entry, wanted: Wanted) -> ReadyServer | None:
        """Return the server that waits, if it is one like that; and start the next one later."""
        with self.changing:
            server, entry.ready = entry.ready, None
            entry.wanted, entry.due = wanted, time.monotonic() + self.later
        if server is None:
            return None
        if server.wanted == wanted and server.take(self.patience):
            return server
        server.close()
        return None


@dataclass
class Session:
    """A session on a node, for one command."""

    entry: Entry
    channel: paramiko.Channel
    address: str
    changing: threading.RLock

    @property
    def described(self) -> dict[str, Any]:
        return {"open": True, "address": self.address}

    def run(self, sock: socket.socket, command: str, ends: list[socket.socket]) -> None:
        """Start the command, and copy its streams until it is over or nobody reads them."""
        try:
            self.channel.settimeout(self.entry.timeout)
            self.channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            socket_file.send(sock, {"runs": False, "error": str(error)})
            return
        self.copy(self.channel, sock, ends)

    def hand_over(
        self, server: ReadyServer, sock: socket.socket, ends: list[socket.socket]
    ) -> None:
        """Let the command have a server in place of a session of its own."""
        self.channel.close()
        self.copy(server.channel, sock, ends, server.unread)

    def copy(
        self,
        channel: paramiko.Channel,
        sock: socket.socket,
        ends: list[socket.socket],
        first: bytes = b"",
    ) -> None:
        """Copy a program's streams until it is over or nobody reads them."""
        with self.changing:
            self.entry.sessions += 1
        try:
            socket_file.send(sock, {"runs": True})
            sock.sendall(first)
            Relay(channel, sock, *ends).run()
        finally:
            channel.close()
            for end in ends:
                end.close()
            with self.changing:
                self.entry.sessions -= 1
                self.entry.due = min(self.entry.due, time.monotonic())


# -- a connection -----------------------------------------------------------------------------


def trust(route: Route, connection: Connection, *, strict: bool) -> None:
    """Raise if a new connection would be refused now, on any machine of the way."""
    link: Connection | None = connection
    for hop in route.hops:
        assert link is not None
        key = link.transport.get_remote_server_key()
        host_keys.check(hop, key, strict=strict, address=link.address)
        link = link.through


# -- the process ------------------------------------------------------------------------------


def hold_connections(idle: float, ready: Callable[[], None], patience: float, later: float) -> None:
    """Hold connections until there is a reason to end; nothing happens if somebody does already."""
    with lock() as held, socket_file.entered() as here:
        name = Path(here, socket_file.name())
        with contextlib.suppress(FileNotFoundError):
            name.unlink()  # of a process that was killed
        listener = socket.socket(socket.AF_UNIX)
        with files.making_sockets():
            listener.bind(str(name))
        listener.listen(WAITING)
        path = socket_file.directory() / socket_file.name()
        open_files.raise_limit()
        holder = Holder(listener, path, held, idle, patience, later)
        interrupt.undo_with(holder.remove_socket)
        ready()
        holder.serve()
        holder.remove_socket()


@contextlib.contextmanager
def lock() -> Iterator[int]:
    """Be the only process that holds connections: of this user, on this machine."""
    where = socket_file.directory()
    where.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        files.make_private(where)
    with socket_file.entered() as here:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(f"{here}/{socket_file.name()}.lock", flags, files.PRIVATE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)
