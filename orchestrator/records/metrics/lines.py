"""Read files of JSON lines that grow. The lines come from nodes: nothing in them is trusted."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.common import files

PIECE_BYTES = 8 << 20  # that are in memory at once
MARK_BYTES = 256  # by which a place is known again: the most of a line, with its time
LARGEST = 1e300  # sums of such values are still finite
WHOLE_BYTES = 1 << 19  # of a file that is read from end to end where a sample would do
LINE_BYTES = 1 << 20  # of the longest line that is sampled

Line = dict[str, Any]


class GrowingFile:
    """A file, and how far it is read. Lines are whole; what is no JSON object is passed over.

    `mark` is a checksum of what stands before that place. A file in which something else stands
    there was cut off or written again, however long it is by now: it is read from its beginning.
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

    def _piece(self) -> bytes:
        try:
            with files.open_plain(self.path) as file:
                file.seek(max(0, self.at - MARK_BYTES))
                before = file.read(min(self.at, MARK_BYTES))
                other = self.mark is not None and zlib.crc32(before) != self.mark
                if other or os.fstat(file.fileno()).st_size < self.at:
                    self.at, before = 0, b""
                    self.replaced += 1
                    file.seek(0)
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


def sampled(path: Path, places: int) -> Iterator[Line]:
    """Yield the lines of a file; of a large one those at so many places, which lie evenly."""
    try:
        with files.open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= WHOLE_BYTES:
                yield from parsed_together(file.read(WHOLE_BYTES).split(b"\n"))
                return
            for place in range(places):
                file.seek(size * place // places)
                if place:
                    file.readline(LINE_BYTES)  # the rest of a line
                if (line := parsed(file.readline(LINE_BYTES))) is not None:
                    yield line
    except OSError:  # it has gone, or may not be read
        return


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
