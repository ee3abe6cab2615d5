"""Files that come to this node from the head: each whole, or not at all.

`IncomingFiles` is one manifest on its way into a place; its kinds say what is lacking there, and
how a file comes to be there.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Protocol

from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import Entry
from orchestrator.protocol.requests.transfer import FilePart, Lacking, parts_of


class OtherContent(ValueError):
    """Raised for a file that came with another content than it should have."""

    def __init__(self, path: bytes) -> None:
        super().__init__(f"{os.fsdecode(path)} came with another content")


class Writing(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None:
        """Add bytes that come next."""

    def finish(self) -> None:
        """Give the whole file its name; OtherContent where it is not what it should be."""

    def abandon(self) -> None:
        """Remove it, as it is not whole."""


class IncomingFiles:
    """The files of one manifest on their way into a place."""

    goes_on = True  # after a file that cannot be written; else that ends the transfer

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.missing = set[int]()  # still to come
        self.failed: dict[int, str] = {}
        self.number, self.at = -1, 0  # of the file that is being written
        self.writing: Writing | None = None

    def look(self, *, dry_run: bool) -> Lacking:
        """Return what is lacking, after making what needs no contents."""
        return Lacking(ranges=(), failed={})

    def begin(self, number: int) -> Writing:
        """Begin to write a file."""
        raise NotImplementedError

    def finish(self) -> None:
        """Do what is due once every file is here."""

    def compare(self, *, dry_run: bool = False) -> Lacking:
        """Return what is lacking; that is awaited from now on."""
        lacking = self.look(dry_run=dry_run)
        self.missing = set(manifest.numbers_in(lacking.ranges, len(self.entries)))
        self.failed = dict(lacking.failed)
        if not (self.missing or dry_run):
            self.finish()
        return lacking

    def put_all(self, data: bytes) -> None:
        """Write the parts of one batch."""
        for part, content in parts_of(data):
            self.put(part, content)

    def put(self, part: FilePart, data: memoryview) -> None:
        """Write some bytes of a file; its last ones give it its name."""
        if part.number in self.failed:
            return
        if part.number not in self.missing:
            raise ValueError("a file that was not lacking")
        try:
            self._put(part, data)
        except OtherContent as error:
            self.fail(part.number, str(error))
        except OSError as error:
            if not self.goes_on:
                raise
            self.fail(part.number, error.strerror or str(error))

    def _put(self, part: FilePart, data: memoryview) -> None:
        size = self.entries[part.number].size
        if part.offset == 0:
            self.abandon()
            self.number, self.at, self.writing = part.number, 0, self.begin(part.number)
        if (part.number, part.offset) != (self.number, self.at) or self.at + len(data) > size:
            raise ValueError("parts of a file in disorder")
        assert self.writing is not None
        self.writing.write(data)
        self.at += len(data)
        if self.at == size:
            self.writing.finish()
            self.writing, self.number = None, -1
            self.missing.discard(part.number)
            if not self.missing:
                self.finish()

    def fail(self, number: int, problem: str) -> None:
        """Give up a file."""
        self.abandon()
        self.failed[number] = problem

    def abandon(self) -> None:
        """Remove the file that is not whole, if there is one."""
        writing, self.writing, self.number = self.writing, None, -1
        if writing is not None:
            writing.abandon()


def unzip(data: bytes | bytearray, most: int) -> bytes:
    """Unpack what another machine sent, up to a limit."""
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(data, most)
    except zlib.error as error:
        raise ValueError(f"damaged on its way: {error}") from None
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError(f"more than {most} bytes, or cut off")
    return content
