"""Check that all machines are there and agree, before a job by hand starts on any of them.

Node 0 listens at the master port, which torchrun gets afterwards; every other node sends a line
that describes it, and waits for the answer. Nothing is authenticated, as with torchrun itself.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Sequence

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

HELLO_SECONDS = 5.0  # a caller that has not described itself by then is not of this job
RETRY_SECONDS = 0.2  # between two attempts to reach node 0
REMIND_SECONDS = 15.0  # between two messages about what is missing


def disagreement(nodes: Sequence[Hello]) -> str:
    """Return why these nodes cannot be one job, or nothing; missing nodes are no reason."""
    first = nodes[0]
    seen: dict[int, Hello] = {}
    for node in nodes:
        if node.nnodes != first.nnodes:
            return f"NNODES is {first.nnodes} on {first.who} and {node.nnodes} on {node.who}"
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

    def __enter__(self) -> Master:
        return self

    def __exit__(self, _: object, error: object, *__: object) -> None:
        if isinstance(error, OrchestratorError):
            self.send(Reply(failed=f"{self.own.who} starts nothing: {error.what}"))
        for connection in (self.server, *self.there):
            connection.close()

    @property
    def nodes(self) -> list[Hello]:
        return sorted([self.own, *self.there.values()], key=lambda node: node.rank)

    def gather(self, patience: float) -> list[Hello]:
        """Wait for all nodes and return them in their order."""
        deadline = time.monotonic() + patience
        self.check()  # of a job of one node
        while missing := sorted(set(range(self.own.nnodes)) - {node.rank for node in self.nodes}):
            names = f"NODE_RANK {', '.join(map(str, missing))}"
            say(f"waiting for {names}")
            if not select.select([self.server], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise refusal(f"{names} did not arrive within {patience:.0f} s")
            self.admit()
        return self.nodes

    def admit(self) -> None:
        """Hear one caller; a caller that is no node of this kind of job is sent away."""
        connection, _ = self.server.accept()
        connection.settimeout(HELLO_SECONDS)
        try:
            with connection.makefile("rb") as lines:
                hello = read_hello(lines.readline(LONGEST_LINE_BYTES))
        except (OSError, Nonsense):
            connection.close()
            return
        # A node whose command was interrupted has left, and may be there again.
        left = [one for one in select.select(list(self.there), [], [], 0)[0] if not one.recv(1)]
        for one in left:
            del self.there[one]
            one.close()
        self.there[connection] = hello
        self.check()

    def check(self) -> None:
        """Refuse, here and on the nodes that are there, what cannot be one job."""
        if reason := disagreement([self.own, *self.there.values()]):
            self.send(Reply(error=reason))
            raise refusal(reason)

    def go(self, agreed: Agreed) -> None:
        self.send(Reply(go=agreed))

    def send(self, reply: Reply) -> None:
        for connection in self.there:
            with contextlib.suppress(OSError):
                connection.sendall(to_line(reply))


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
            with socket.create_connection(address, timeout=HELLO_SECONDS) as master:
                master.sendall(hello_line(hello))
                master.settimeout(max(0.01, deadline - time.monotonic()))
                with master.makefile("rb") as lines:
                    return decision(read_reply(lines.readline(LONGEST_LINE_BYTES)))
        except Nonsense:
            reason = "does something else listen there?"
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


def decision(reply: Reply) -> Agreed:
    """Return what node 0 decided, or raise its reason for starting nothing."""
    if reply.error:
        raise refusal(reply.error)
    if reply.go is None:
        raise CheckFailed(reply.failed, "its terminal says what to do")
    return reply.go
