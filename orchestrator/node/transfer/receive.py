"""Files that come to this node, from the head or from another node: each whole and checked, or not.

A `FileTarget` is a place with its policy: what is lacking there, and how a file comes to be there.
`IncomingFiles` is one manifest on its way into a target. It can be given on while it comes.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Sequence
from typing import BinaryIO, Protocol

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

    def finish(self, total: str) -> None:
        """Give the whole file its name; OtherContent where its SHA-256 is not `total`."""

    def abandon(self) -> None:
        """Leave it, as it is not whole."""


class FileTarget:
    """A place for the files of a manifest, and the policy by which they come to be there."""

    goes_on = True  # after a file that cannot be written; else that ends the transfer

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries

    def compare(self, *, dry_run: bool) -> Lacking:
        """Say what is lacking, after making what needs no contents."""
        raise NotImplementedError

    def begin(self, number: int, offset: int) -> Writing:
        """Begin with a file, from an offset on that `compare` has named."""
        raise NotImplementedError

    def open(self, number: int) -> BinaryIO | None:
        """Open a file that is here, to give it on; None where it is not here after all."""
        raise NotImplementedError

    def finish(self) -> None:
        """Do what is due once every file is here."""

    def abandon(self) -> None:
        """Leave nothing half done: no more will come."""


class IncomingFiles:
    """The files of one manifest on their way into a target."""

    def __init__(self, target: FileTarget, *, all_here: bool = False) -> None:
        self.target = target
        self.lacking = Lacking(ranges=(), failed={})
        self.missing = set[int]() if all_here else set(range(len(target.entries)))  # still to come
        self.failed: dict[int, str] = {}
        self.news = threading.Condition()  # more has come
        self.number, self.at = -1, 0  # of the file that is being written
        self.writing: Writing | None = None
        self.behind: Behind | None = None

    def compare(self, *, dry_run: bool = False) -> Lacking:
        """Say what is lacking; that is awaited from now on."""
        self.lacking = self.target.compare(dry_run=dry_run)
        count = len(self.target.entries)
        self.missing = set(manifest.numbers_in(self.lacking.ranges, count))
        self.failed = dict(self.lacking.failed)
        if not (self.missing or dry_run):
            self.target.finish()
        return self.lacking

    # -- what comes --------------------------------------------------------------------------

    def take_batch(self, data: bytes, *, last: bool) -> None:
        """Write the parts of one batch, while the next one is unpacked."""
        if self.behind is None:
            self.behind = Behind(self)
        self.behind.put(data)
        if last:
            self.behind.finish()

    def put(self, part: FilePart, data: memoryview) -> None:
        """Write some bytes of a file; its last ones give it its name."""
        if part.number in self.failed:
            return
        if part.number not in self.missing:
            raise ValueError("a file that was not lacking")
        try:
            if part.number != self.number:
                self.close()
                self.writing = self.target.begin(part.number, part.offset)
                self.number, self.at = part.number, part.offset
            self._write(part, data)
        except OtherContent as error:
            self.fail(part.number, str(error))
        except OSError as error:
            if not self.target.goes_on:
                raise
            self.fail(part.number, error.strerror or str(error))

    def _write(self, part: FilePart, data: memoryview) -> None:
        assert self.writing is not None
        entry = self.target.entries[part.number]
        if part.offset != self.at or self.at + len(data) > entry.size:
            raise ValueError("parts of a file in disorder")
        self.writing.write(data)
        self.at += len(data)
        if self.at == entry.size:
            total = part.sum or entry.value.decode()
            if not total:
                raise ValueError("a file came without its checksum")
            self.writing.finish(total)
            self.writing, self.number = None, -1
            with self.news:
                self.missing.discard(part.number)
                self.news.notify_all()
            if not self.missing:
                self.target.finish()

    def fail(self, number: int, problem: str) -> None:
        """Give up a file."""
        self.close()
        with self.news:
            self.failed[number] = problem
            self.news.notify_all()

    def close(self) -> None:
        """Leave the file that is not whole, if there is one."""
        writing, self.writing, self.number = self.writing, None, -1
        if writing is not None:
            writing.abandon()

    def abandon(self) -> None:
        """Take nothing more."""
        if self.behind is not None:
            self.behind.end()
        self.close()
        self.target.abandon()

    # -- for other nodes ---------------------------------------------------------------------

    def open(self, number: int) -> BinaryIO | None:
        """Open a file to give it on; None while it is missing, LookupError where it stays so."""
        if not 0 <= number < len(self.target.entries) or number in self.failed:
            raise LookupError(number)
        return None if number in self.missing else self.target.open(number)

    def size(self, number: int) -> int:
        return self.target.entries[number].size

    def wait(self, seconds: float) -> None:
        with self.news:
            self.news.wait(seconds)


class Behind:
    """Writes batches in a thread, one behind: an error is raised by the next call."""

    def __init__(self, incoming: IncomingFiles) -> None:
        self.incoming = incoming
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def put(self, data: bytes) -> None:
        """Begin with this batch, once the one before is written."""
        self.finish()
        self.thread = threading.Thread(target=self.run, args=(data,), daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Wait until all is written."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """Wait, and pass over an error: it was said, or is not asked for any more."""
        if self.thread is not None:
            self.thread.join()

    def run(self, data: bytes) -> None:
        try:
            for part, content in parts_of(data):
                self.incoming.put(part, content)
        except Exception as error:  # noqa: BLE001  it is raised where the batch was put
            self.error = error


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
