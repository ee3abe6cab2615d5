"""A server of ours on a node that has greeted, and waits for the command that will use it."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import channel as channels
from orchestrator.head.connect import server_command
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.ssh import Connection, SshChannel
from orchestrator.head.nodes.environment import Environment
from orchestrator.protocol import frames
from orchestrator.protocol.frames import PIECE, Splitter
from orchestrator.protocol.message import Nonsense
from orchestrator.protocol.timing import SERVER_BEAT, SERVER_PATIENCE

NO_HEAD = frames.header(PIECE, 0)  # asks for no answer, and says that no head has been here yet
LONGEST = 600.0  # seconds that one waits: what a login finds on its node may change meanwhile
READ = 1 << 16

_loading = threading.Lock()
_loaded = ""  # the edition of the sources that are in memory


@dataclass(frozen=True)
class Wanted:
    """Compare servers: two are equal by what is around them, the Pythons, and our sources."""

    environment: Environment
    pythons: tuple[str, ...]
    edition: str

    @staticmethod
    def of(data: dict[str, Any]) -> Wanted:
        environment = Environment(**data["environment"])
        return Wanted(environment, tuple(data["pythons"]), str(data["edition"]))


class ReadyServer:
    """One that was started on a connection. It says something each second until it is taken."""

    def __init__(self, connection: Connection, wanted: Wanted, timeout: float) -> None:
        load(wanted.edition)
        self.wanted = wanted
        if wanted.pythons != tuple(server_command.pythons(wanted.environment)):
            raise NodeError("the command runs under another Python")
        server = NodeChannel(connection, wanted.environment, timeout)
        try:
            server.begin(timeout)
            assert isinstance(server.channel, SshChannel)
            self.channel = server.channel.channel
            self.splitter = Splitter()
            self.drop(bytes(server.rest))
        except BaseException:
            server.close()
            raise
        self.using = threading.Lock()  # a command takes it, and the holder looks after it
        self.unread = b""  # the beginning of a frame, when it is taken
        self.taken = False
        self.born = self.heard = self.told = time.monotonic()

    def look(self, now: float) -> bool:
        """Listen to it and tell it that we are there; tell whether it may wait on."""
        with self.using:
            if self.taken:
                return True
            if not self.listen(now) or now - self.born > LONGEST:
                return False
            if now - self.told > SERVER_PATIENCE / 3:
                self.told = now
                self.channel.sendall(NO_HEAD)
            return True

    def take(self, patience: float) -> bool:
        """Take it out of here, if it is well: it spoke a moment ago."""
        with self.using:
            now = time.monotonic()
            if not self.listen(now) or now - self.heard > SERVER_BEAT + patience:
                return False
            with contextlib.suppress(OSError):
                self.channel.sendall(NO_HEAD)
                self.taken, self.unread = True, bytes(self.splitter.waiting)
            return self.taken

    def listen(self, now: float) -> bool:
        """Read what has come; tell whether it still runs."""
        try:
            while self.channel.recv_ready():
                self.drop(self.channel.recv(READ))
                self.heard = now
        except (OSError, Nonsense):
            return False
        return not (self.channel.closed or self.channel.eof_received)

    def drop(self, data: bytes) -> None:
        for _ in self.splitter.feed(data):
            pass  # a sign of life

    def close(self) -> None:
        self.channel.close()


def load(edition: str) -> None:
    """Read our sources anew if they have changed, or raise if they are not those of the asker."""
    global _loaded  # noqa: PLW0603  what library() keeps is of the whole process, too
    with _loading:
        now = channels.edition()
        if now != edition:
            raise NodeError("the command runs another copy of this package")
        if now != _loaded:
            channels.read.cache_clear()
            channels.installer.cache_clear()
            channels.library()
            _loaded = now
