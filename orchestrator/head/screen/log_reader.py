"""Reads the nodes' log files: which rank wrote which bytes.

The file is the queue: followers append a node's bytes to `node_<i>_<ip>.txt`, and whoever shows
them reads that file at its own pace, so a slow terminal costs no memory and loses nothing.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from orchestrator.common import files
from orchestrator.head.screen.lines import LONGEST_CHARACTERS, LineSplitter

NO_RANK = "-"  # the stream of torchrun's own output and the supervisor's
GOODBYE = "~"  # the same, after all ranks of the node have ended well
_BLOCK_BYTES = 64 * 1024
_RECORD = re.compile(r"^([0-9]{1,18}) ([0-9]{1,9}|[-~])$", re.MULTILINE)


@dataclass(frozen=True)
class LogFile:
    """One node's log here on the head, and the record of which rank wrote which bytes."""

    node: int
    label: str  # the node as the user wrote it, such as 10.0.0.2
    text: Path
    ranks: Path  # lines "<offset> <stream>": from that byte of the log on, it is that stream

    def size(self) -> int:
        return _size(self.text)


class Piece(NamedTuple):
    """Bytes that one stream (a global rank, or `-`) wrote in one go."""

    stream: str
    data: bytes


class LogReader:
    """Read what was appended to one log since the last look, stream by stream."""

    def __init__(self, log: LogFile, *, start: int = 0) -> None:
        self.log = log
        self._end: int | None = None
        self.skip_to(start)

    @property
    def position(self) -> int:
        return self._position

    @property
    def line_start(self) -> int:
        """Return where the line begins whose end is not read yet; else the position."""
        begin = max(0, self._position - LONGEST_CHARACTERS)
        _, newline, rest = _read(self.log.text, begin, self._position - begin).rpartition(b"\n")
        return self._position - len(rest) if newline or not begin else self._position

    def behind(self) -> int:
        size = self.log.size()
        return max(0, (size if self._end is None else min(size, self._end)) - self._position)

    def end_here(self) -> None:
        """Read no more than the log has now."""
        self._end = self.log.size()

    def skip_to(self, offset: int) -> None:
        self._position = offset
        self._stream = NO_RANK
        self._records = _Records(self.log.ranks, offset)

    def skip_near_end(self, keep: int) -> int:
        """Go to the first line within the last `keep` bytes; return how many were left out."""
        offset = self.log.size() - keep
        if offset <= self._position:
            return 0
        _, newline, rest = _read(self.log.text, offset, keep).partition(b"\n")
        before = self._position
        self.skip_to(offset + keep - len(rest) if newline else offset)
        return self._position - before

    def read(self, limit: int = 1 << 20) -> list[Piece]:
        limit = min(limit, self.behind())
        if not limit:
            return []
        # The bytes first: records are written before the bytes they describe, so whatever was
        # just read, its records are complete by the time they are read.
        data = _read(self.log.text, self._position, limit)
        begin, end = self._position, self._position + len(data)
        pieces = []
        at = begin
        for offset, stream in self._records.before(end):
            if stream != self._stream and offset > at:
                pieces.append(Piece(self._stream, data[at - begin : offset - begin]))
                at = offset
            self._stream = stream
        if at < end:
            pieces.append(Piece(self._stream, data[at - begin :]))
        self._position = end
        return pieces


class _Records:
    """The records of a `.ranks` file in the order of the log, never many at a time in memory."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._position = _last_record_before(path, offset) if offset else 0
        self._ahead: list[tuple[int, str]] = []  # the next one last

    def before(self, end: int) -> Iterator[tuple[int, str]]:
        """Take the records whose offset is under `end`."""
        while True:
            while self._ahead and self._ahead[-1][0] < end:
                yield self._ahead.pop()
            if self._ahead or not self._load():
                return

    def _load(self) -> bool:
        block = _read(self._path, self._position, _BLOCK_BYTES)
        whole = block[: block.rfind(b"\n") + 1]  # the last record may be half written yet
        self._position += len(whole)
        records = _RECORD.findall(whole.decode("ascii", "replace"))
        self._ahead = [(int(offset), stream) for offset, stream in reversed(records)]
        return bool(whole)


def _last_record_before(path: Path, offset: int) -> int:
    """Find where to begin in a `.ranks` file to know the stream at `offset`.

    By bisection, as the file is sorted: a log of 1 GB can have 100 MB of records.
    """
    low, high = 0, _size(path)
    while high - low > _BLOCK_BYTES:
        middle = (low + high) // 2
        block = _read(path, middle, 256).decode("ascii", "replace")
        start = block.find("\n") + 1
        record = _RECORD.match(block, start)
        if record and int(record[1]) <= offset:
            low = middle + start
        else:
            high = middle
    return low


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # nothing was written yet
        return 0


def _read(path: Path, offset: int, limit: int) -> bytes:
    try:
        with files.open_plain(path) as file:
            file.seek(offset)
            return file.read(limit)
    except FileNotFoundError:
        return b""


# -- log tail -----------------------------------------------------------------------------------
# Finds the last lines of a node or a rank from the end of its log, however long that is.

_WINDOW_BYTES = 64 * 1024  # of the first look
_LOOKS_BACK_BYTES = 16 << 20  # the last words of a rank are not further away than that
_CRASH_LINES = 200  # a crash dump lists every thread and every frame down to torchrun's
_LAST_LINES = 20  # of a rank that left no traceback
_DUMPS = ("Fatal Python error", "Timeout (")  # of a crash, and of faulthandler's timer
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+")

Placed = Iterator[tuple[int, Piece]]  # pieces, each with its place in the log


def tail(log: LogFile, lines: int, rank: int | None) -> list[str]:
    """Return the last lines of a node, or of one rank there, found from the end of the file.

    A rank that has said nothing within the last 16 MiB of the log has no last lines here.
    """
    splitters: dict[str, LineSplitter] = {}
    last: deque[str] = deque(maxlen=lines)
    for _, (stream, data) in _placed(log, last_begin(log, lines, rank), log.size(), rank):
        last.extend(splitters.setdefault(stream, LineSplitter()).feed(data))
    for splitter in splitters.values():
        last.extend(splitter.flush())
    return list(last)


def last_begin(log: LogFile, lines: int, rank: int | None) -> int:
    """Return where the last lines of a node begin, or of one rank there, to be read on from there.

    Of a rank that has said less within the last 16 MiB it is where these begin.
    """
    end, window, longest = log.size(), _WINDOW_BYTES, False
    begins = deque([0])
    while not longest:
        start = max(0, end - window)
        longest = start == 0 or window >= _LOOKS_BACK_BYTES
        begins = deque([start], maxlen=lines + 1)  # of lines; the last one has no end
        for at, (_, data) in _placed(log, start, end, rank):
            begins.extend(at + match.end() for match in re.finditer(rb"\n", data))
        if begins[0] > start:
            break
        window = min(window * 8, _LOOKS_BACK_BYTES)
    return begins[0]


def _placed(log: LogFile, start: int, end: int, rank: int | None) -> Placed:
    """Yield the pieces of log[start:end] that are shown, or one rank's, each with its place."""
    reader = LogReader(log, start=start)
    while (at := reader.position) < end:
        pieces = reader.read(min(1 << 20, end - at))
        if not pieces:  # the file shrank: nobody does that, but it must not hang us
            return
        for piece in pieces:
            if piece.stream == str(rank) or (rank is None and piece.stream != GOODBYE):
                yield at, piece
            at += len(piece.data)


def last_words(log: LogFile, rank: int | None) -> list[str]:
    """Return the end of a rank's log, or of a crash dump its message and the user's own frames."""
    lines = tail(log, _CRASH_LINES, rank)
    starts = [i for i, line in enumerate(lines) if line.startswith(_DUMPS)]
    if not starts:
        return lines[-_LAST_LINES:]
    threads = [[lines[starts[-1]]]]
    for line in lines[starts[-1] + 1 :]:
        if _THREAD.match(line):
            threads.append([])
        threads[-1].append(line)
    heading, *others = [users_frames(thread) for thread in threads]
    shown = [thread for thread in others if len(thread) > 1]  # not those that are all ours
    return [line for thread in (heading, *shown) for line in thread if line.strip()]


def users_frames(thread: list[str]) -> list[str]:
    """Return a thread's stack above our own frames, from which the program was called."""
    ours = (i for i, line in enumerate(thread) if "orchestrator/node/job/ranks/rank.py" in line)
    return thread[: min(next(ours, len(thread)), _LAST_LINES)]
