"""Reads the nodes' log files, with the rank that wrote each part.

The file is the queue: followers append a node's bytes to `node_<i>_<ip>.txt`, and the screen reads
that file at its own pace. A slow terminal therefore costs no memory and loses nothing.
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

# The stream of torchrun's and the supervisor's own output.
NO_RANK = "-"
# The same stream, after all ranks of the node have ended without error.
GOODBYE = "~"
_BLOCK_BYTES = 64 * 1024
_RECORD = re.compile(
    r"^([0-9]{1,18}) ([0-9]{1,9}|[-~])(?: ([0-9]{1,11}[.][0-9]{2}))?$", re.MULTILINE
)


@dataclass(frozen=True)
class LogFile:
    """One node's log here on the head, and the record of which rank wrote which bytes."""

    node: int
    # The node as the user wrote it, such as 10.0.0.2.
    label: str
    text: Path
    # Lines "<offset> <stream> <time>": the log is of that stream from that byte on, and was printed
    # from that time on by the node's clock. Nodes of earlier versions wrote no time.
    ranks: Path

    def size(self) -> int:
        return _size(self.text)


class Piece(NamedTuple):
    """Consecutive bytes of one stream (a global rank, or `-`)."""

    stream: str
    data: bytes


# A piece and the time at which it was printed, by the node's clock; 0 if it was not recorded.
Timed = tuple[Piece, float]


class LogReader:
    """Reads the bytes that were appended to one log since the last read, by stream."""

    def __init__(self, log: LogFile, *, start: int = 0) -> None:
        self.log = log
        self._end: int | None = None
        self.skip_to(start)

    @property
    def position(self) -> int:
        return self._position

    @property
    def line_start(self) -> int:
        """Return the offset of the unfinished line at the position, or else the position."""
        begin = max(0, self._position - LONGEST_CHARACTERS)
        _, newline, rest = _read(self.log.text, begin, self._position - begin).rpartition(b"\n")
        return self._position - len(rest) if newline or not begin else self._position

    def behind(self) -> int:
        size = self.log.size()
        return max(0, (size if self._end is None else min(size, self._end)) - self._position)

    def end_here(self) -> None:
        """Limit reading to the current size of the log."""
        self._end = self.log.size()

    def skip_to(self, offset: int) -> None:
        self._position = offset
        self._stream, self._time = NO_RANK, 0.0
        self._records = _Records(self.log.ranks, offset)

    def skip_near_end(self, keep: int) -> int:
        """Skip to the first line within the last `keep` bytes; return the count skipped."""
        offset = self.log.size() - keep
        if offset <= self._position:
            return 0
        _, newline, rest = _read(self.log.text, offset, keep).partition(b"\n")
        before = self._position
        self.skip_to(offset + keep - len(rest) if newline else offset)
        return self._position - before

    def read(self, limit: int = 1 << 20) -> list[Piece]:
        return [piece for piece, _ in self.read_timed(limit)]

    def read_timed(self, limit: int) -> list[Timed]:
        """Read as read() does, and split what a stream printed at several times."""
        limit = min(limit, self.behind())
        if not limit:
            return []
        # Records are written before the bytes that they describe. If the bytes are read first, the
        # records of these bytes are complete when they are read.
        data = _read(self.log.text, self._position, limit)
        begin, end = self._position, self._position + len(data)
        pieces = []
        at = begin
        for offset, stream, time in self._records.before(end):
            if (stream, time) != (self._stream, self._time) and offset > at:
                pieces.append((Piece(self._stream, data[at - begin : offset - begin]), self._time))
                at = offset
            self._stream, self._time = stream, time
        if at < end:
            pieces.append((Piece(self._stream, data[at - begin :]), self._time))
        self._position = end
        return pieces


class _Records:
    """Reads the records of a `.ranks` file in order, a block at a time."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._position = _last_record_before(path, offset) if offset else 0
        # Records that are read ahead, in reverse order.
        self._ahead: list[tuple[int, str, float]] = []

    def before(self, end: int) -> Iterator[tuple[int, str, float]]:
        """Yield and remove the next records whose offset is below `end`."""
        while True:
            while self._ahead and self._ahead[-1][0] < end:
                yield self._ahead.pop()
            if self._ahead or not self._load():
                return

    def _load(self) -> bool:
        block = _read(self._path, self._position, _BLOCK_BYTES)
        # The last record may be incomplete.
        whole = block[: block.rfind(b"\n") + 1]
        self._position += len(whole)
        records = _RECORD.findall(whole.decode("ascii", "replace"))
        self._ahead = [
            (int(offset), stream, float(at or 0)) for offset, stream, at in reversed(records)
        ]
        return bool(whole)


def _last_record_before(path: Path, offset: int) -> int:
    """Return a position in a `.ranks` file from which reading yields the stream at `offset`.

    It bisects the sorted file, as a log of 1 GB can have 100 MB of records.
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
    except FileNotFoundError:
        # No bytes were written yet.
        return 0


def _read(path: Path, offset: int, limit: int) -> bytes:
    try:
        with files.open_plain(path) as file:
            file.seek(offset)
            return file.read(limit)
    except FileNotFoundError:
        return b""


# -- log tail -----------------------------------------------------------------------------------
# Finds the last lines of a node or a rank from the end of its log, without reading all of it.

# The part of the log that is searched first.
_WINDOW_BYTES = 64 * 1024
# The last lines of a rank are searched within this part of the log.
_LOOKS_BACK_BYTES = 16 << 20
# A crash dump lists every thread with all its frames, torchrun's included.
_CRASH_LINES = 200
# The lines to show of a rank without a crash dump.
_LAST_LINES = 20
# The first line of a crash dump and of a dump by faulthandler's timer.
_DUMPS = ("Fatal Python error", "Timeout (")
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+")

# Pieces, each with its offset in the log.
Placed = Iterator[tuple[int, Piece]]


def tail_lines(log: LogFile, lines: int, rank: int | None) -> list[str]:
    """Return the last lines of a node, or of one rank there, found from the end of the file.

    A rank without output in the last 16 MiB of the log has no last lines here.
    """
    splitters: dict[str, LineSplitter] = {}
    last: deque[str] = deque(maxlen=lines)
    for _, (stream, data) in _placed(log, last_begin(log, lines, rank), log.size(), rank):
        last.extend(splitters.setdefault(stream, LineSplitter()).feed(data))
    for splitter in splitters.values():
        last.extend(splitter.flush())
    return list(last)


def last_begin(log: LogFile, lines: int, rank: int | None) -> int:
    """Return the offset at which the last lines of a node, or of one rank there, begin.

    If the last 16 MiB have fewer lines, it is the offset where these 16 MiB begin.
    """
    end, window, longest = log.size(), _WINDOW_BYTES, False
    begins = deque([0])
    while not longest:
        start = max(0, end - window)
        longest = start == 0 or window >= _LOOKS_BACK_BYTES
        # Offsets of lines, the last of which is unfinished.
        begins = deque([start], maxlen=lines + 1)
        for at, (_, data) in _placed(log, start, end, rank):
            begins.extend(at + match.end() for match in re.finditer(rb"\n", data))
        if begins[0] > start:
            break
        window = min(window * 8, _LOOKS_BACK_BYTES)
    return begins[0]


def _placed(log: LogFile, start: int, end: int, rank: int | None) -> Placed:
    """Yield (offset, piece) for the visible pieces of log[start:end], or for those of one rank."""
    reader = LogReader(log, start=start)
    while (at := reader.position) < end:
        pieces = reader.read(min(1 << 20, end - at))
        # The file was truncated, which must not cause an endless loop.
        if not pieces:
            return
        for piece in pieces:
            if piece.stream == str(rank) or (rank is None and piece.stream != GOODBYE):
                yield at, piece
            at += len(piece.data)


def last_words(log: LogFile, rank: int | None) -> list[str]:
    """Return the last lines of a rank; of a crash dump, its message and the user's frames."""
    lines = tail_lines(log, _CRASH_LINES, rank)
    starts = [i for i, line in enumerate(lines) if line.startswith(_DUMPS)]
    if not starts:
        return lines[-_LAST_LINES:]
    threads = [[lines[starts[-1]]]]
    for line in lines[starts[-1] + 1 :]:
        if _THREAD.match(line):
            threads.append([])
        threads[-1].append(line)
    heading, *others = [users_frames(thread) for thread in threads]
    # Threads without a frame of the user are left out.
    shown = [thread for thread in others if len(thread) > 1]
    return [line for thread in (heading, *shown) for line in thread if line.strip()]


def users_frames(thread: list[str]) -> list[str]:
    """Return the frames of a thread without our own frames that called the program."""
    ours = (i for i, line in enumerate(thread) if "orchestrator/node/job/ranks/rank.py" in line)
    return thread[: min(next(ours, len(thread)), _LAST_LINES)]
