"""Check that all machines are there and agree, before a job by hand starts on any of them.

Node 0 listens at the master port, which torchrun gets afterwards; every other node says who it is
and waits for the answer. Each message is one line of JSON. Nothing is authenticated, as with
torchrun itself: a stranger can spoil the start, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.errors import CheckFailed, NodeError, OrchestratorError

Say = Callable[[str], None]
LONGEST_LINE = 1 << 16
RETRY = 0.2  # seconds between two attempts to reach node 0
REMIND = 15.0  # seconds between two messages about who is missing


@dataclass(frozen=True)
class Hello:
    """A node's report about itself."""

    rank: int
    nnodes: int
    nproc: int
    host: str
    program: str = ""
    world: int | None = None  # WORLD_SIZE, if it is set

    @property
    def who(self) -> str:
        return f"node {self.rank} ({self.host})"


def disagreement(nodes: Sequence[Hello]) -> str:
    """Return why these nodes cannot be one job, or nothing; missing nodes are no reason."""
    first = nodes[0]
    seen: dict[int, Hello] = {}
    for node in nodes:
        if node.nnodes != first.nnodes:
            return f"NNODES is {first.nnodes} on {first.who} and {node.nnodes} on {node.who}"
        if not 0 <= node.rank < node.nnodes:
            return f"NODE_RANK is {node.rank} on {node.host}; it must be below NNODES={node.nnodes}"
        if node.rank in seen:
            return f"NODE_RANK is {node.rank} twice: on {seen[node.rank].host} and on {node.host}"
        if node.program != first.program:
            return f"{first.who} starts {first.program}, and {node.who} {node.program}"
        seen[node.rank] = node
    world = sum(node.nproc for node in nodes)
    for node in nodes:
        if len(nodes) == first.nnodes and node.world not in (None, world):
            return f"WORLD_SIZE is {node.world} on {node.who}, but all nodes together have {world}"
    return ""


class Master:
    """Node 0: gathers the others and tells them to go; on an error no node is left waiting."""

    def __init__(self, own: Hello, port: int) -> None:
        self.own = own
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            self.server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        except OSError as error:
            raise CheckFailed(
                f"port {port} is taken on this machine, the master ({error.strerror})",
                "set MASTER_PORT to another one, the same on all nodes",
            ) from error
        self.there: dict[socket.socket, Hello] = {}
        self.unread: dict[socket.socket, bytes] = {}
        self.refused = False

    def __enter__(self) -> Master:
        return self

    def __exit__(self, _: object, error: object, *__: object) -> None:
        if isinstance(error, OrchestratorError) and not self.refused:
            self.tell({"failed": f"{self.own.who} starts nothing: {error.what}"})
        for connection in (self.server, *self.there, *self.unread):
            connection.close()

    @property
    def nodes(self) -> list[Hello]:
        return sorted([self.own, *self.there.values()], key=lambda node: node.rank)

    def gather(self, patience: float, say: Say) -> list[Hello]:
        """Wait for all nodes and return them in their order."""
        deadline = time.monotonic() + patience
        remind = time.monotonic() + 1
        while len(self.there) + 1 < self.own.nnodes:
            now = time.monotonic()
            missing = sorted(set(range(self.own.nnodes)) - {node.rank for node in self.nodes})
            names = f"NODE_RANK {', '.join(map(str, missing))}"
            if now > deadline:
                raise self.refuse(f"{names} did not arrive within {patience:.0f} s")
            if now > remind:
                remind = now + REMIND
                say(f"waiting for {names}")
                self.tell({"waiting": names})
            waiting = [self.server, *self.unread, *self.there]
            for connection in select.select(waiting, [], [], min(1.0, deadline - now))[0]:
                self.hear(connection)
        return self.nodes

    def hear(self, connection: socket.socket) -> None:
        if connection is self.server:
            client, _ = self.server.accept()
            client.settimeout(5)
            self.unread[client] = b""
            return
        try:
            data = connection.recv(LONGEST_LINE)
        except OSError:
            data = b""
        known = self.unread.get(connection, b"") + data
        if not data or connection in self.there or len(known) > LONGEST_LINE:
            self.drop(connection)  # it has left, or is not of this job
        elif known.endswith(b"\n"):
            try:
                self.there[connection] = Hello(**json.loads(known)["orchestrator"])
            except (ValueError, KeyError, TypeError):
                self.drop(connection)
                return
            del self.unread[connection]
            why = disagreement([self.own, *self.there.values()])
            if why:
                raise self.refuse(why)
        else:
            self.unread[connection] = known

    def drop(self, connection: socket.socket) -> None:
        self.there.pop(connection, None)
        self.unread.pop(connection, None)
        connection.close()

    def refuse(self, why: str) -> CheckFailed:
        self.refused = True
        self.tell({"error": why})
        return refusal(why)

    def go(self, agreed: dict[str, Any]) -> None:
        self.tell({"go": agreed})

    def tell(self, word: dict[str, Any]) -> None:
        for connection in self.there:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(word).encode() + b"\n")


def refusal(why: str) -> CheckFailed:
    return CheckFailed(
        f"the nodes do not agree: {why}; nothing was started",
        "use each NODE_RANK from 0 to NNODES-1 once, and the same NNODES, program and master on all"
        " nodes",
    )


def join(own: Hello, address: tuple[str, int], patience: float, say: Say) -> dict[str, Any]:
    """On any other node, wait for all nodes, and return what node 0 decided."""
    deadline, remind = time.monotonic() + patience, time.monotonic() + REMIND / 5
    why = ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(address, timeout=5) as master:
                master.sendall(json.dumps({"orchestrator": asdict(own)}).encode() + b"\n")
                agreed = answer(master, deadline, say)
            if agreed is not None:
                return agreed
            why = "it hangs up: does something else listen there?"
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > remind:
            remind = time.monotonic() + REMIND
            say(f"node 0 cannot be reached at {address[0]}:{address[1]} yet ({why})")
        time.sleep(RETRY)
    raise NodeError(
        f"node 0 was not there within {patience:.0f} s, at {address[0]}:{address[1]}"
        f" ({why or 'it does not answer'})",
        "start it with NODE_RANK=0 on the machine that MASTER_ADDR names; firewalls have to allow"
        " MASTER_PORT",
    )


def answer(master: socket.socket, deadline: float, say: Say) -> dict[str, Any] | None:
    with master.makefile("rb") as lines:
        while True:
            master.settimeout(max(0.01, deadline - time.monotonic()))
            line = lines.readline(LONGEST_LINE)
            if not line:
                return None
            word = json.loads(line)
            if "error" in word:
                raise refusal(word["error"])
            if "failed" in word:
                raise CheckFailed(word["failed"], "its terminal says what to do")
            if "go" in word:
                agreed: dict[str, Any] = word["go"]
                return agreed
            say(f"waiting for {word['waiting']}")
