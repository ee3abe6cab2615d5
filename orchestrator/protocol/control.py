"""Types the lines that supervisors hear, on their socket and of one another, and those of run-node.

By the last, machines that are started by hand agree to be one job. Whoever writes a line may be of
another version: unknown keys are passed over. The supervisor sends a newline to every listener on
its socket when there is something new in its files, and nothing else.
"""

from __future__ import annotations

import json
from typing import Any, Optional, Union

from orchestrator.protocol.events import EndOrder
from orchestrator.protocol.message import Message, Nonsense, Port, decode, encode, parse


class HeadNews(Message):
    """A head follows the job."""

    head: str = "here"


class PeerWord(Message):
    """One beat of a supervisor: all it knows, as this may be the first that arrives."""

    node: int
    followed: bool  # a head has followed the job
    end: Optional[EndOrder] = None
    done: bool = False  # this node's part is over


def to_line(message: Message) -> bytes:
    return json.dumps(encode(message)).encode("ascii") + b"\n"


def from_line(line: bytes) -> Union[EndOrder, HeadNews]:
    """Return what a line on the supervisor's socket says."""
    data = parse(line)
    return (
        decode(HeadNews, data, newer=True) if "head" in data else decode(EndOrder, data, newer=True)
    )


def peer_word(data: dict[str, Any]) -> PeerWord:
    return decode(PeerWord, data, newer=True)


# -- between machines that are started by hand ------------------------------------------------

LONGEST_LINE_BYTES = 1 << 16


class Hello(Message):
    """A node's report about itself."""

    rank: int
    nnodes: int
    nproc: int
    host: str
    program: str = ""
    world: Optional[int] = None  # WORLD_SIZE, if it is set

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

    error: str = ""  # why the nodes cannot be one job
    failed: str = ""  # why node 0 starts nothing
    go: Optional[Agreed] = None


def hello_line(hello: Hello) -> bytes:
    return json.dumps({"orchestrator": encode(hello)}).encode("ascii") + b"\n"


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
