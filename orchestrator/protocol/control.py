"""Messages to supervisors, on their socket and from one another, and those of run-node.

With the latter, machines that are started by hand agree to form one job. A line may come from
another version, so unknown keys are ignored. The supervisor only sends newlines to its listeners,
each of which means that its files have grown.
"""

from __future__ import annotations

import json
from typing import Optional, Union

from orchestrator.protocol.events import EndOrder
from orchestrator.protocol.message import Message, Nonsense, Port, decode, encode, parse


class HeadState(Message):
    """A head follows the job."""

    head: str = "here"


class PeerHeartbeat(Message):
    """One heartbeat of a supervisor, with its whole state, as it may be the first to arrive."""

    node: int
    # True once a head has followed the job.
    followed: bool
    end: Optional[EndOrder] = None
    # True if this node's part is over.
    done: bool = False


def to_line(message: Message) -> bytes:
    return json.dumps(encode(message)).encode("ascii") + b"\n"


def from_line(line: bytes) -> Union[EndOrder, HeadState]:
    """Return the message of a line on the supervisor's socket."""
    data = parse(line)
    return (
        decode(HeadState, data, newer=True)
        if "head" in data
        else decode(EndOrder, data, newer=True)
    )


# -- between machines that are started by hand ------------------------------------------------

LONGEST_LINE_BYTES = 1 << 16


class Hello(Message):
    """A node's report about itself."""

    rank: int
    nnodes: int
    nproc: int
    host: str
    program: str = ""
    # WORLD_SIZE, if it is set.
    world: Optional[int] = None

    @property
    def who(self) -> str:
        return f"node {self.rank} ({self.host})"


class Agreed(Message):
    """Node 0's decision for all nodes."""

    job: str
    experiment: str
    # Numbers of ranks, in the order of the nodes.
    counts: tuple[int, ...]
    # The secret that proves a supervisor to the others.
    token: str
    peers_port: Port


class Reply(Message):
    """Node 0's answer: exactly one of these fields is set."""

    # The reason why the nodes cannot form one job.
    error: str = ""
    # The reason why node 0 starts nothing.
    failed: str = ""
    go: Optional[Agreed] = None


def read_reply(line: bytes) -> Reply:
    reply = decode(Reply, parse(line), newer=True)
    if reply == Reply():
        raise Nonsense("not a reply of node 0")
    return reply
