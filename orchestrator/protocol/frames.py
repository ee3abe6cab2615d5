"""Frames, the units that machines send each other: head and server, supervisors, run-node's.

The first byte is the kind, the next four the length of the payload. A stream frame's payload begins
with eight bytes: the file offset of the bytes that follow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from orchestrator.protocol.message import Nonsense

# Sent both ways: a request, an answer, a heartbeat or the greeting.
JSON = b"J"
# Sent to the node: a part of the next request's payload.
PIECE = b"P"
# Sent to the head: bytes of a job's log, of its `ranks` file, and of its events.
LOG = b"L"
RANKS = b"R"
EVENTS = b"E"
STREAMS = (LOG, RANKS, EVENTS)
# Between supervisors: a random number first, then a signature and the JSON that it signs.
SIGNED = b"S"

HEADER = struct.Struct(">cI")
OFFSET = struct.Struct(">Q")
# The most bytes of a file in one frame.
STREAM_CHUNK_BYTES = 1 << 18
# The longest answer is the stacks and collectives of all ranks of a node: 2 MB each, escaped.
LARGEST = {
    JSON: 1 << 28,
    PIECE: 1 << 23,
    LOG: STREAM_CHUNK_BYTES + OFFSET.size,
    RANKS: STREAM_CHUNK_BYTES + OFFSET.size,
    EVENTS: STREAM_CHUNK_BYTES + OFFSET.size,
}
SMALLEST = dict.fromkeys(STREAMS, OFFSET.size)
# Among nodes, where strangers may call: supervisors sign, and those of run-node have no key yet.
AMONG_NODES = {SIGNED: 1 << 14, JSON: 1 << 16}


def frame_header(kind: bytes, size: int) -> bytes:
    return HEADER.pack(kind, size)


def parse_header(data: bytes, largest: Mapping[bytes, int] = LARGEST) -> tuple[bytes, int]:
    """Return the kind and the payload's length from a header of five bytes."""
    kind, size = HEADER.unpack(data)
    if kind not in largest:
        raise Nonsense(f"a frame of unknown kind {kind!r}")
    if not SMALLEST.get(kind, 0) <= size <= largest[kind]:
        raise Nonsense(f"a frame {kind.decode()} of {size} bytes")
    return kind, size


class Splitter:
    """Splits the received bytes into frames; an incomplete frame waits for the rest."""

    def __init__(self, largest: Mapping[bytes, int] = LARGEST) -> None:
        self.largest, self.waiting = largest, bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        self.waiting += data
        while len(self.waiting) >= HEADER.size:
            kind, size = parse_header(bytes(self.waiting[: HEADER.size]), self.largest)
            end = HEADER.size + size
            if len(self.waiting) < end:
                return
            payload = bytes(self.waiting[HEADER.size : end])
            del self.waiting[:end]
            yield kind, payload
