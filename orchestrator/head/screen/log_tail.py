"""Finds the last lines of a node or a rank from the end of its log, however long that is."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

from orchestrator.head.screen.lines import LineSplitter
from orchestrator.head.screen.log_reader import GOODBYE, LogFile, LogReader, Piece

_WINDOW = 64 * 1024  # bytes of the first look
_LOOKS_BACK = 16 << 20  # bytes; the last words of a rank are not further away than that
_CRASH_LINES = 200  # a crash dump lists every thread and every frame down to torchrun's
_LAST_LINES = 20  # of a rank that left no traceback
_DUMPS = ("Fatal Python error", "Timeout (")  # of a crash, and of faulthandler's timer
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+")

Placed = Iterator[tuple[int, Piece]]  # pieces, each with its place in the log


def tail(log: LogFile, lines: int, rank: int | None) -> list[str]:
    """Return the last lines of a node, or of one rank there, found from the end of the file.

    A rank that has said nothing within the last 16 MiB of the log has no last lines here.
    """
    last: list[str] = []
    for _, longest, pieces in _ends(log, rank) if lines > 0 else ():
        last, sure = _last_lines(pieces, lines, cut=not longest)
        if sure:
            break
    return last


def last_begin(log: LogFile, lines: int, rank: int | None) -> int:
    """Return where the last lines of a node begin, or of one rank there, to be read on from there.

    Of a rank that has said less within the last 16 MiB it is where these begin.
    """
    begins = deque([0])
    for start, _, pieces in _ends(log, rank):
        begins = deque([start], maxlen=lines + 1)  # of lines; the last one has no end
        for at, (_, data) in pieces:
            begins.extend(at + match.end() for match in re.finditer(rb"\n", data))
        if begins[0] > start:
            break
    return begins[0]


def _ends(log: LogFile, rank: int | None) -> Iterator[tuple[int, bool, Placed]]:
    """Yield ever longer ends of a log: where each starts, whether it is the longest, its pieces."""
    end, window = log.size(), _WINDOW
    while True:
        start = max(0, end - window)
        longest = start == 0 or window == _LOOKS_BACK
        yield start, longest, _placed(log, start, end, rank)
        if longest:
            return
        window = min(window * 8, _LOOKS_BACK)


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
    heading, *others = [_own_frames(thread) for thread in threads]
    shown = [thread for thread in others if len(thread) > 1]  # not those that are all ours
    return [line for thread in (heading, *shown) for line in thread if line.strip()]


def _own_frames(thread: list[str]) -> list[str]:
    """Return a thread's stack above our own frames, from which the program was called."""
    ours = (i for i, line in enumerate(thread) if "orchestrator/node/job/rank.py" in line)
    return thread[: min(next(ours, len(thread)), _LAST_LINES)]


def _last_lines(pieces: Placed, lines: int, *, cut: bool) -> tuple[list[str], bool]:
    """Return the last lines of an end of a log, and whether they are all there and whole.

    With `cut`, the first line of each stream is taken for one that began before it. It is left
    out with all before it, so that what is found has no hole.
    """
    splitters: dict[str, LineSplitter] = {}
    whole: set[str] = set()
    last: deque[str] = deque(maxlen=lines)
    for _, (stream, data) in pieces:
        if stream not in splitters:
            splitters[stream] = LineSplitter()
        finished = splitters[stream].feed(data)
        if cut and finished and stream not in whole:
            whole.add(stream)
            last.clear()
            del finished[0]
        last.extend(finished)
    for splitter in splitters.values():
        last.extend(splitter.flush())
    return list(last), len(last) == lines and whole == splitters.keys()
