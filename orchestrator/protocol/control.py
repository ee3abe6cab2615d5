"""Messages to supervisors, on their socket and from one another, and those of run-node.

With the latter, machines that are started by hand agree to form one job. On a socket of one machine
go lines of JSON, between machines frames. Either may come from another version, so unknown keys are
ignored. The supervisor only sends newlines to its listeners, each of which means that its files
have grown.
"""

from __future__ import annotations

import socket
from typing import Any, Optional, Union

from orchestrator.protocol.events import EndOrder
from orchestrator.protocol.frames import AMONG_NODES, HEADER, JSON, frame_header, parse_header
from orchestrator.protocol.message import Message, Port, decode_value, parse_object, to_json


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


def message_to_line(message: Message) -> bytes:
    return to_json(message).encode("ascii") + b"\n"


def message_from_line(line: bytes) -> Union[EndOrder, HeadState]:
    """Return the message of a line on the supervisor's socket."""
    data = parse_object(line)
    return (
        decode_value(HeadState, data, newer=True)
        if "head" in data
        else decode_value(EndOrder, data, newer=True)
    )


# -- between machines that are started by hand ------------------------------------------------


def message_to_frame(message: Message) -> bytes:
    text = to_json(message).encode("ascii")
    return frame_header(JSON, len(text)) + text


def read_frame(connection: socket.socket) -> dict[str, Any]:
    """Return the JSON of the next frame; one that is cut off, or none, is Nonsense."""
    with connection.makefile("rb") as stream:
        _, size = parse_header(stream.read(HEADER.size).ljust(HEADER.size), AMONG_NODES)
        return parse_object(stream.read(size))


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
    """Node 0's answer: one of these fields is set."""

    # The reason why the nodes cannot form one job.
    error: str = ""
    # The reason why node 0 starts nothing.
    failed: str = ""
    go: Optional[Agreed] = None
