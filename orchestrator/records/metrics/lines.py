"""Read files of JSON lines that grow. The lines come from nodes: nothing in them is trusted."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator.common import files

PIECE_BYTES = 8 << 20  # that are in memory at once
MARK_BYTES = 256  # by which a place is known again: the most of a line, with its time
LARGEST = 1e300  # sums of such values are still finite

Line = dict[str, Any]


class GrowingFile:
    """A file, and how far it is read. Lines are whole; what is no JSON object is passed over.

    `mark` is a checksum of what stands before that place. A file in which something else stands
    there was cut off or written anew, however long it is by now: it is read from its beginning.
    """

    def __init__(
        self,
        path: Path,
        at: int = 0,
        piece: int = PIECE_BYTES,
        mark: int | None = None,
        having: bytes = b"",  # lines without it are passed over
    ) -> None:
        self.path, self.at, self.piece, self.mark, self.having = path, at, piece, mark, having
        self.replaced = 0  # how often it had to be read from its beginning

    def read(self) -> list[Line]:
        """Return what is new, in pieces: an empty list means that there is no more for now."""
        while whole := self._piece():
            raws = whole.split(b"\n") if self.having in whole else ()
            if lines := parsed_together([raw for raw in raws if raw and self.having in raw]):
                return lines
        return []

    def lines(self) -> Iterator[Line]:
        """Yield all that is new."""
        while lines := self.read():
            yield from lines

    def unread(self) -> int:
        """Return how many bytes there are that were not read."""
        try:
            with files.open_plain(self.path) as file:
                return self._new(file)
        except OSError:
            return 0

    def skip(self) -> None:
        """Pass over all that there is now; what comes later is read."""
        try:
            with files.open_plain(self.path) as file:
                self.at = os.fstat(file.fileno()).st_size
                self.mark = zlib.crc32(self._before(file))
        except OSError:
            return

    def _new(self, file: BinaryIO) -> int:
        """Return how many bytes are new; of another file all are."""
        size = os.fstat(file.fileno()).st_size
        if size < self.at or self._is_another(file):
            self.at = 0
            self.replaced += 1
        return size - self.at

    def _piece(self) -> bytes:
        try:
            with files.open_plain(self.path) as file:
                self._new(file)
                before = self._before(file)
                data = file.read(self.piece)
        except OSError:
            return b""
        whole, newline, _ = data.rpartition(b"\n")
        if not newline and len(data) == self.piece:
            whole = data  # a line that long is not one of ours
        whole += newline
        self.at += len(whole)
        self.mark = zlib.crc32((before + whole)[-MARK_BYTES:])
        return whole

    def _before(self, file: BinaryIO) -> bytes:
        """Read what stands before the place; what is read next is what follows it."""
        file.seek(max(0, self.at - MARK_BYTES))
        return file.read(min(self.at, MARK_BYTES))

    def _is_another(self, file: BinaryIO) -> bool:
        return self.mark is not None and zlib.crc32(self._before(file)) != self.mark


def parsed_together(raws: list[bytes]) -> list[Line]:
    """Parse many lines at once, in half the time; where one is damaged, one by one."""
    try:
        lines = json.loads(b"[%s]" % b",".join(raws))
    except (ValueError, RecursionError):
        lines = []
    if len(lines) != len(raws):
        lines = map(parsed, raws)
    return [line for line in lines if isinstance(line, dict)]


def parsed(raw: bytes) -> Line | None:
    """Return the object that a line holds; None where it is empty, or cut off by a job's end."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def number(value: Any) -> float | None:
    """Return a value that is a finite number; None for another."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < LARGEST else None
