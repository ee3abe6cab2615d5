"""Check that all machines are there and agree, before a job by hand starts on any of them.

Node 0 listens at the master port, which torchrun gets afterwards; every other node says who it is
and waits for the answer. Nothing is authenticated, as with torchrun itself. A stranger that says
hello as a missing node would do can spoil the start; it also hears the token by which the
supervisors know each other, and could end the job, unless all nodes share a secret.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import time
from collections.abc import Mapping, Sequence

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.head.screen.output import say
from orchestrator.protocol.control import (
    LONGEST_LINE_BYTES,
    Agreed,
    Hello,
    Reply,
    hello_line,
    read_hello,
    read_reply,
    to_line,
)
from orchestrator.protocol.message import Nonsense

SECRET = "ORCHESTRATOR_SECRET"
STRANGERS = 64  # connections that have not said hello yet
RETRY_SECONDS = 0.2  # between two attempts to reach node 0
REMIND_SECONDS = 15.0  # between two messages about who is missing


def disagreement(nodes: Sequence[Hello]) -> str:
    """Return why these nodes cannot be one job, or nothing; missing nodes are no reason."""
    first = nodes[0]
    seen: dict[int, Hello] = {}
    for node in nodes:
        if node.nnodes != first.nnodes:
            return f"NNODES is {first.nnodes} on {first.who} and {node.nnodes} on {node.who}"
        if node.secret != first.secret:
            return f"{SECRET} is set on {(first if first.secret else node).who} alone"
        if node.nproc < 1:
            return f"{node.who} says that it starts {node.nproc} ranks"
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

    def __init__(self, hello: Hello, port: int) -> None:
        self.own = hello
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
        self.unread: dict[socket.socket, bytes] = {}  # in the order in which they came
        self.refused = False
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.server, selectors.EVENT_READ)

    def __enter__(self) -> Master:
        return self

    def __exit__(self, _: object, error: object, *__: object) -> None:
        if isinstance(error, OrchestratorError) and not self.refused:
            self.send(Reply(failed=f"{self.own.who} starts nothing: {error.what}"))
        self.selector.close()
        for connection in (self.server, *self.there, *self.unread):
            connection.close()

    @property
    def nodes(self) -> list[Hello]:
        return sorted([self.own, *self.there.values()], key=lambda node: node.rank)

    def gather(self, patience: float) -> list[Hello]:
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
                remind = now + REMIND_SECONDS
                say(f"waiting for {names}")
                self.send(Reply(waiting=names))
            for key, _ in self.selector.select(max(0.0, min(1.0, deadline - now))):
                if key.fileobj is self.server:
                    self.admit()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() != -1:
                    self.hear(key.fileobj)
        return self.nodes

    def admit(self) -> None:
        """Accept a connection; of too many that say nothing, the oldest has to go."""
        try:
            client, _ = self.server.accept()
        except OSError:  # it left again; or no descriptor is left, and one is closed
            client = None
        if client is not None:
            client.settimeout(5)
            self.unread[client] = b""
            self.selector.register(client, selectors.EVENT_READ)
        if self.unread and (client is None or len(self.unread) > STRANGERS):
            self.drop(next(iter(self.unread)))

    def hear(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(LONGEST_LINE_BYTES)
        except OSError:
            data = b""
        known = self.unread.get(connection, b"") + data
        if not data or connection in self.there or len(known) > LONGEST_LINE_BYTES:
            self.drop(connection)  # it has left, or is not of this job
        elif known.endswith(b"\n"):
            try:
                self.there[connection] = read_hello(known)
            except Nonsense:
                self.drop(connection)
                return
            del self.unread[connection]
            reason = disagreement([self.own, *self.there.values()])
            if reason:
                raise self.refuse(reason)
        else:
            self.unread[connection] = known

    def drop(self, connection: socket.socket) -> None:
        self.there.pop(connection, None)
        self.unread.pop(connection, None)
        self.selector.unregister(connection)
        connection.close()

    def refuse(self, reason: str) -> CheckFailed:
        self.refused = True
        self.send(Reply(error=reason))
        return refusal(reason)

    def go(self, agreed: Agreed) -> None:
        self.send(Reply(go=agreed))

    def send(self, reply: Reply) -> None:
        for connection in self.there:
            with contextlib.suppress(OSError):
                connection.sendall(to_line(reply))


def token_of(agreed: Agreed, environ: Mapping[str, str]) -> str:
    """Return the supervisors' token: what was agreed on, made unusable without the secret."""
    secret = environ.get(SECRET, "")
    if not secret:
        return agreed.token
    return hmac.digest(secret.encode(), agreed.token.encode(), "sha256").hex()


def refusal(reason: str) -> CheckFailed:
    return CheckFailed(
        f"the nodes do not agree: {reason}; nothing was started",
        "use each NODE_RANK from 0 to NNODES-1 once, and the same NNODES, program and master on all"
        " nodes",
    )


def join(hello: Hello, address: tuple[str, int], patience: float) -> Agreed:
    """On any other node, wait for all nodes, and return what node 0 decided."""
    deadline, remind = time.monotonic() + patience, time.monotonic() + REMIND_SECONDS / 5
    reason = ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(address, timeout=5) as master:
                master.sendall(hello_line(hello))
                agreed = answer(master, hello, deadline)
            if agreed is not None:
                return agreed
            reason = "it hangs up: does something else listen there?"
        except Nonsense:
            reason = "it speaks another language: does something else listen there?"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > remind:
            remind = time.monotonic() + REMIND_SECONDS
            say(f"node 0 cannot be reached at {address[0]}:{address[1]} yet ({reason})")
        time.sleep(RETRY_SECONDS)
    raise NodeError(
        f"node 0 was not there within {patience:.0f} s, at {address[0]}:{address[1]}"
        f" ({reason or 'it does not answer'})",
        "start it with NODE_RANK=0 on the machine that MASTER_ADDR names; firewalls have to allow"
        " MASTER_PORT",
    )


def answer(master: socket.socket, hello: Hello, deadline: float) -> Agreed | None:
    """Wait for node 0's decision; None where it hangs up."""
    with master.makefile("rb") as lines:
        while True:
            master.settimeout(max(0.01, deadline - time.monotonic()))
            line = lines.readline(LONGEST_LINE_BYTES)
            if not line:
                return None
            reply = read_reply(line)
            if reply.error:
                raise refusal(reply.error)
            if reply.failed:
                raise CheckFailed(reply.failed, "its terminal says what to do")
            if reply.go is not None:
                return checked(reply.go, hello)
            say(f"waiting for {reply.waiting}")


def checked(agreed: Agreed, hello: Hello) -> Agreed:
    """Refuse a decision that is none for this node."""
    counts = agreed.counts
    if len(counts) != hello.nnodes or min(counts) < 1 or counts[hello.rank] != hello.nproc:
        raise Nonsense(f"the counts {counts} are not those of {hello.nnodes} nodes")
    return agreed
