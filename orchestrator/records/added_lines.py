"""Read the lines that were added to a file of JSON lines since the last look."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator.common import files

PIECE = 8 << 20  # bytes of one look
LAST = 256  # bytes by which a place is known again: the most of a line, with its time


class AddedLines:
    """A file, and how far it is read. Lines are whole; what is none is passed over.

    `mark` is a checksum of what stands before that place. A file in which something else stands
    there was cut off or written anew, however long it is by now: it is read from its beginning.
    """

    def __init__(
        self,
        path: Path,
        at: int = 0,
        piece: int = PIECE,
        mark: int | None = None,
        having: bytes = b"",  # lines without it are none
    ) -> None:
        self.path, self.at, self.piece, self.mark, self.having = path, at, piece, mark, having
        self.anew = 0  # how often it was begun anew

    def read(self) -> list[dict[str, Any]]:
        """Return what is new, in pieces: an empty list means that there is no more for now."""
        found: list[dict[str, Any]] = []
        while not found:
            whole = self._piece()
            if not whole:
                break
            raws = whole.split(b"\n") if self.having in whole else ()
            found = together([raw for raw in raws if raw and self.having in raw])
        return found

    def behind(self) -> int:
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
            self.anew += 1
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
            whole = data  # a line that long is none of ours
        whole += newline
        self.at += len(whole)
        self.mark = zlib.crc32((before + whole)[-LAST:])
        return whole

    def _before(self, file: BinaryIO) -> bytes:
        """Read what stands before the place; what is read next is what follows it."""
        file.seek(max(0, self.at - LAST))
        return file.read(min(self.at, LAST))

    def _is_another(self, file: BinaryIO) -> bool:
        return self.mark is not None and zlib.crc32(self._before(file)) != self.mark


def together(raws: list[bytes]) -> list[dict[str, Any]]:
    """Read many lines at once, in half the time; where one is none, each by itself."""
    try:
        lines = json.loads(b"[%s]" % b",".join(raws))
    except (ValueError, RecursionError):
        lines = []
    if len(lines) != len(raws):
        lines = map(parsed, raws)
    return [line for line in lines if isinstance(line, dict)]


def parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):  # empty, or cut off by the end of the job
        return None
    return line if isinstance(line, dict) else None
