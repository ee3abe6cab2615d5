"""Frames, the units in which a head and a node's server send over their channel.

One byte says the kind, four bytes the length of the payload. The payload of a stream's frame begins
with eight bytes: the offset, in the file that it comes from, of the bytes that follow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, Optional

from orchestrator.protocol.message import Nonsense

JSON = b"J"  # both ways: a request, an answer, a heartbeat, the greeting
PIECE = b"P"  # to the node: bytes that the next request is about
LOG = b"L"  # to the head: a job's log,
RANKS = b"R"  # whose bytes these are,
EVENTS = b"E"  # and its events
CALL = b"C"  # both ways: a piece of a call in a rank, or of its result
STREAMS = (LOG, RANKS, EVENTS)

HEADER = struct.Struct(">cI")
OFFSET = struct.Struct(">Q")
PART = struct.Struct(
    ">IQc?"
)  # rank, number of the call, kind, more to come: what a CALL begins with
EVERY_RANK = 0xFFFFFFFF
STREAM_CHUNK_BYTES = 1 << 18  # of a file in one frame
CALL_CHUNK_BYTES = 1 << 18
# Stacks and collectives of every rank of a node are the longest answer: 2 MB each, escaped.
LARGEST = {
    JSON: 1 << 28,
    PIECE: 1 << 23,
    LOG: STREAM_CHUNK_BYTES + OFFSET.size,
    RANKS: STREAM_CHUNK_BYTES + OFFSET.size,
    EVENTS: STREAM_CHUNK_BYTES + OFFSET.size,
    CALL: CALL_CHUNK_BYTES + PART.size,
}
SMALLEST = {**dict.fromkeys(STREAMS, OFFSET.size), CALL: PART.size}


def header(kind: bytes, size: int) -> bytes:
    return HEADER.pack(kind, size)


def parse_header(data: bytes) -> tuple[bytes, int]:
    """Return the kind and the payload's length that five bytes announce."""
    kind, size = HEADER.unpack(data)
    if kind not in LARGEST:
        raise Nonsense(f"a frame of unknown kind {kind!r}")
    if not SMALLEST.get(kind, 0) <= size <= LARGEST[kind]:
        raise Nonsense(f"a frame {kind.decode()} of {size} bytes")
    return kind, size


class Splitter:
    """Cuts the bytes that arrive into frames; an incomplete frame waits for its rest."""

    def __init__(self) -> None:
        self.waiting = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        self.waiting += data
        while frame := self._next():
            yield frame

    def _next(self) -> Optional[tuple[bytes, bytes]]:
        if len(self.waiting) < HEADER.size:
            return None
        kind, size = parse_header(bytes(self.waiting[: HEADER.size]))
        end = HEADER.size + size
        if len(self.waiting) < end:
            return None
        payload = bytes(self.waiting[HEADER.size : end])
        del self.waiting[:end]
        return kind, payload


# -- calls in ranks ---------------------------------------------------------------------------

READY = b"y"  # both ways: are you there?
# To a rank:
RUN = b"r"  # a pickled function and its arguments
LINE = b"l"  # typed for its debugger
INTERRUPT = b"i"  # Ctrl-C: for its node's server, which sends SIGINT
CLOSE = b"q"
# From a rank:
RESULT = b"o"
RAISED = b"e"
SHOW = b"s"  # by its debugger
ASK = b"a"  # its debugger waits for a line
GONE = b"g"  # its process, or the connection to its node


class Part(NamedTuple):
    """A piece of a call, or of its answer."""

    rank: int
    number: int
    kind: bytes
    more: bool
    data: bytes

    def frame(self) -> bytes:
        head = PART.pack(self.rank, self.number, self.kind, self.more)
        return header(CALL, len(head) + len(self.data)) + head + self.data


def part(payload: bytes) -> Part:
    """Read the payload of a CALL."""
    rank, number, kind, more = PART.unpack_from(payload)
    return Part(rank, number, kind, more, payload[PART.size :])


def call_frames(rank: int, number: int, kind: bytes, data: bytes) -> Iterator[bytes]:
    """Cut a call, or an answer, into frames."""
    view = memoryview(data)
    for start in range(0, max(1, len(data)), CALL_CHUNK_BYTES):
        piece = bytes(view[start : start + CALL_CHUNK_BYTES])
        yield Part(rank, number, kind, start + CALL_CHUNK_BYTES < len(data), piece).frame()
