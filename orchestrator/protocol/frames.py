"""Frames, the units in which a head and a node's server send over their channel.

One byte says the kind, four bytes the length of the payload. The payload of a stream's frame begins
with eight bytes: the offset, in the file that it comes from, of the bytes that follow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Optional

from orchestrator.protocol.message import Nonsense

JSON = b"J"  # both ways: a request, an answer, a heartbeat, the greeting
PIECE = b"P"  # to the node: bytes that the next request is about
LOG = b"L"  # to the head: a job's log,
RANKS = b"R"  # whose bytes these are,
EVENTS = b"E"  # and its events
STREAMS = (LOG, RANKS, EVENTS)

HEADER = struct.Struct(">cI")
OFFSET = struct.Struct(">Q")
STREAM_CHUNK_BYTES = 1 << 18  # of a file in one frame
# Stacks and collectives of every rank of a node are the longest answer: 2 MB each, escaped.
LARGEST = {
    JSON: 1 << 28,
    PIECE: 1 << 23,
    LOG: STREAM_CHUNK_BYTES + OFFSET.size,
    RANKS: STREAM_CHUNK_BYTES + OFFSET.size,
    EVENTS: STREAM_CHUNK_BYTES + OFFSET.size,
}
SMALLEST = dict.fromkeys(STREAMS, OFFSET.size)


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
