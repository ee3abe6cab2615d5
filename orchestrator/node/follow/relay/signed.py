"""Signs what a head and a node say to each other through a relay, which can delay, not forge it.

Both ends have a key that the head has drawn for this one conversation, and sent over SSH. Nothing
can be changed, left out, said twice or sent back. The relay can read it: it runs the same job for
the same user.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from orchestrator.node.peers.signed_connection import Broken, Signature

HEAD = struct.Struct(">I32s")  # bytes of a record, their signature
LARGEST_BYTES = 1 << 16  # of one record
KEY_BYTES = 32


class Forged(ConnectionError):
    """Something came that the other end has not said, or not there."""

    def __init__(self) -> None:
        super().__init__("what came through its relay is not what it said")


class Signed:
    """One end of it."""

    __slots__ = ("rest", "signature")

    def __init__(self, key: bytes, *, calls: bool) -> None:
        self.signature = Signature(key, "spoke" if calls else "hub")
        self.rest = b""  # of a record that has not come whole

    @property
    def proved(self) -> bool:
        """Tell whether the other end has shown that it has the key; an empty word does so."""
        return self.signature.proved > 0

    def seal(self, data: bytes) -> bytes:
        """Return what has to be carried so that the other end reads this."""
        starts = range(0, max(1, len(data)), LARGEST_BYTES)
        return b"".join(self._record(data[at : at + LARGEST_BYTES]) for at in starts)

    def open(self, data: bytes) -> bytes:
        """Take what came; return what the other end says with it, perhaps nothing yet."""
        return b"".join(self._said(self.rest + data if self.rest else data))

    def _record(self, said: bytes) -> bytes:
        return HEAD.pack(len(said), self.signature.sign(said)) + said

    def _said(self, data: bytes) -> Iterator[bytes]:
        at = 0
        while len(data) - at >= HEAD.size:
            size, signature = HEAD.unpack_from(data, at)
            start, end = at + HEAD.size, at + HEAD.size + size
            if size > LARGEST_BYTES:
                raise Forged
            if len(data) < end:
                break
            try:
                self.signature.prove(signature, data[start:end])
            except Broken:
                raise Forged from None
            yield data[start:end]
            at = end
        self.rest = data[at:]
