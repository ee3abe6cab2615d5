"""Types the lines by which machines that are started by hand agree to be one job (`run-node`).

They may be of different versions: unknown keys are passed over.
"""

from __future__ import annotations

import json
from typing import Any, Optional

from orchestrator.protocol.message import Message, Nonsense, Port, decode, encode, parse

LONGEST_LINE = 1 << 16


class Hello(Message):
    """A node's report about itself."""

    rank: int
    nnodes: int
    nproc: int
    host: str
    program: str = ""
    world: Optional[int] = None  # WORLD_SIZE, if it is set
    secret: bool = False  # whether ORCHESTRATOR_SECRET is set there

    @property
    def who(self) -> str:
        return f"node {self.rank} ({self.host})"


class Agreed(Message):
    """The decision of node 0 for all."""

    job: str
    experiment: str
    counts: tuple[int, ...]  # ranks, in the order of the nodes
    token: str  # by which the supervisors know each other
    peers_port: Port


class Reply(Message):
    """Node 0's answer: one of these."""

    waiting: str = ""  # for whom it waits
    error: str = ""  # why the nodes cannot be one job
    failed: str = ""  # why node 0 starts nothing
    go: Optional[Agreed] = None


def hello_line(hello: Hello) -> bytes:
    return to_line({"orchestrator": encode(hello)})


def reply_line(reply: Reply) -> bytes:
    return to_line(encode(reply))


def to_line(data: Any) -> bytes:
    return json.dumps(data).encode("ascii") + b"\n"


def read_hello(line: bytes) -> Hello:
    data = parse(line).get("orchestrator")
    if data is None:
        raise Nonsense("not the hello of a node")
    return decode(Hello, data, newer=True)


def read_reply(line: bytes) -> Reply:
    reply = decode(Reply, parse(line), newer=True)
    if reply == Reply():
        raise Nonsense("not a reply of node 0")
    return reply
