"""Reads files of JSON lines that grow. The lines come from nodes and are not trusted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.common import files

# The most bytes in memory at once.
PIECE_BYTES = 8 << 20
# A checksum of this many bytes before a position identifies the file. They include the time of
# a line.
MARK_BYTES = 256
# Sums of values below this are still finite.
LARGEST = 1e300
# Smaller files are read completely where a sample would do.
WHOLE_BYTES = 1 << 19
# The longest line that is sampled.
LINE_BYTES = 1 << 20

Line = dict[str, Any]


class GrowingFile:
    """A file of JSON lines and the position up to which it is read.

    Lines that are not JSON objects are skipped. `mark` is a checksum of the bytes before the
    position. If they differ, the file was truncated or rewritten, and is read from its start.
    """

    def __init__(
        self,
        path: Path,
        at: int = 0,
        piece: int = PIECE_BYTES,
        mark: int | None = None,
        # Lines without these bytes are skipped.
        having: bytes = b"",
    ) -> None:
        self.path, self.at, self.piece, self.mark, self.having = path, at, piece, mark, having
        # How often the file was read again from its start.
        self.replaced = 0

    def read(self) -> list[Line]:
        """Return the next new lines. An empty list means that there are none for now."""
        while whole := self._piece():
            raws = whole.split(b"\n") if self.having in whole else ()
            if lines := list(filter(None, (parse_line(raw) for raw in raws if self.having in raw))):
                return lines
        return []

    def lines(self) -> Iterator[Line]:
        """Yield all new lines."""
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
            # A line of that length is invalid. It is consumed like a whole one.
            whole = data
        whole += newline
        self.at += len(whole)
        self.mark = zlib.crc32((before + whole)[-MARK_BYTES:])
        return whole


def sampled_lines(path: Path, places: int) -> Iterator[Line]:
    """Yield the lines of a small file, or the lines at evenly spaced places of a large one."""
    # The file may be removed or unreadable.
    with contextlib.suppress(OSError), files.open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= WHOLE_BYTES:
            yield from filter(None, map(parse_line, file.read(WHOLE_BYTES).split(b"\n")))
        for place in range(places if size > WHOLE_BYTES else 0):
            file.seek(size * place // places)
            if place:
                # The place is within a line, whose rest is skipped.
                file.readline(LINE_BYTES)
            if (line := parse_line(file.readline(LINE_BYTES))) is not None:
                yield line


def last_lines(path: Path, most: int) -> Iterator[Line]:
    """Yield the lines in the last `most` bytes of a file, the last one first."""
    try:
        with files.open_plain(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            raws = file.read(most).split(b"\n")
    except OSError:
        # The file may be removed, unreadable, or still on its node.
        return
    yield from filter(None, map(parse_line, reversed(raws)))


def numbered_files(directory: Path, names: re.Pattern[str]) -> dict[int, dict[int, Path]]:
    """Return the files by the two numbers in their names, in order; the second may be left out."""
    found: dict[int, dict[int, Path]] = {}
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            match = names.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                found.setdefault(int(match[1]), {})[int(match[2] or 1)] = Path(entry.path)
    return {number: dict(sorted(found[number].items())) for number in sorted(found)}


def parse_line(raw: bytes) -> Line | None:
    """Return the object in a line, or None if it is empty or truncated."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def finite_number(value: Any) -> float | None:
    """Return the value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < LARGEST else None
