"""Reads the nodes' log files: which rank wrote which bytes, as finished lines, safe to print.

The file is the queue: followers append a node's bytes to `node_<i>_<ip>.txt`, and whoever shows
them reads that file at its own pace, so a slow terminal costs no memory and loses nothing.
It also reads the last words of a rank, for whoever concludes a job.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

NO_RANK = "-"  # the stream of torchrun's own output and the supervisor's
GOODBYE = "~"  # the same, after all ranks of the node have ended well
LONGEST = 64 * 1024 - 1  # characters of a line before it is cut; with the mark, 64 Ki
CONTINUED = "…"
_BLOCK = 64 * 1024
_FEW = 1024  # bytes of records
_TAIL_LOOKS_BACK = 16 << 20  # bytes; the last words of a rank are not further away than that
_CRASH_LINES = 200  # a crash dump lists every thread and every frame down to torchrun's
_LAST_LINES = 20  # of a rank that left no traceback
_DUMPS = ("Fatal Python error", "Timeout (")  # of a crash, and of faulthandler's timer
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+")
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
        self.skip_to(start)

    @property
    def position(self) -> int:
        return self._position

    @property
    def line_start(self) -> int:
        """Return where the line begins whose end is not read yet; else the position."""
        begin = max(0, self._position - LONGEST)
        _, newline, rest = _read(self.log.text, begin, self._position - begin).rpartition(b"\n")
        return self._position - len(rest) if newline or not begin else self._position

    def behind(self) -> int:
        return max(0, self.log.size() - self._position)

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
        if not self.behind():
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
        self._ahead: deque[tuple[int, str]] = deque()

    def before(self, end: int) -> Iterator[tuple[int, str]]:
        """Take the records whose offset is under `end`."""
        while True:
            while self._ahead and self._ahead[0][0] < end:
                yield self._ahead.popleft()
            if self._ahead or not self._load():
                return

    def _load(self) -> bool:
        block = _read(self._path, self._position, _BLOCK)
        whole = block[: block.rfind(b"\n") + 1]  # the last record may be half written yet
        self._position += len(whole)
        records = _RECORD.findall(whole.decode("ascii", "replace"))
        self._ahead.extend((int(offset), stream) for offset, stream in records)
        return bool(whole)


def stream_at(log: LogFile, offset: int) -> str:
    """Return whose the byte at that offset is, by a few small reads."""
    begin = _last_record_before(log.ranks, offset, _FEW)
    block = _read(log.ranks, begin, 2 * _FEW)
    whole = block[: block.rfind(b"\n") + 1].decode("ascii", "replace")
    streams = [stream for at, stream in _RECORD.findall(whole) if int(at) <= offset]
    return streams[-1] if streams else NO_RANK


def _last_record_before(path: Path, offset: int, near: int = _BLOCK) -> int:
    """Find where to begin in a `.ranks` file to know the stream at `offset`.

    By bisection, as the file is sorted: a log of 1 GB can have 100 MB of records.
    """
    low, high = 0, _size(path)
    while high - low > near:
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
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return file.read(limit)
    except FileNotFoundError:
        return b""


class LineSplitter:
    """Turns the bytes of one stream into finished lines, and the line that still changes.

    The lines do not depend on where the bytes were split. Between two calls at most LONGEST
    characters are kept: an endless line comes out in pieces, all but the last marked as continued.
    """

    def __init__(self, color: bool = False) -> None:
        self._color = color
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._partial = ""  # the unfinished line, without what a \r has overwritten

    def feed(self, data: bytes) -> list[str]:
        text = self._partial + self._decode(data)
        lines = text.split("\n")
        self._partial = lines.pop()
        if lines:
            # Nearly all text is clean, and then these two loops in C are all there is to do.
            short = len(text) <= LONGEST or max(map(len, lines)) <= LONGEST
            if not short or not all(map(str.isprintable, lines)):
                lines = [shown for line in lines for shown in self._finish(line)]
        if self._partial:
            pieces, self._partial = self._settle(self._partial)
            lines += pieces
        return lines

    @property
    def live(self) -> str:
        """Return the line that a terminal would show now: a progress bar, dots, a prompt."""
        return clean(self._partial.rstrip("\r")).rstrip()

    def flush(self) -> list[str]:
        """Return the unfinished line, if it holds anything."""
        lines = self._finish(self._partial + self._decode(b"", True))
        self._partial = ""
        return lines if clean(lines[-1]).strip() else lines[:-1]

    def _finish(self, line: str) -> list[str]:
        if len(line) <= LONGEST and line.isprintable():
            return [line]
        pieces, rest = self._settle(line)
        return [*pieces, clean(rest.rstrip("\r"), self._color)]

    def _settle(self, text: str) -> tuple[list[str], str]:
        """Return (full pieces, what remains): only the text after the last \\r remains.

        A bare \\r at the end stays with the text before it: that is overwritten by what comes next.
        """
        kept = text.rstrip("\r")
        if len(text) <= LONGEST:
            return [], kept.rpartition("\r")[2] + text[len(kept) :][:1]
        pieces: list[str] = []
        rest = ""
        for run in kept.split("\r"):
            full = max(0, len(run) - 1) // LONGEST * LONGEST
            pieces += (run[at : at + LONGEST] for at in range(0, full, LONGEST))
            rest = run[full:]
        marked = [clean(piece, self._color) + CONTINUED for piece in pieces]
        return marked, rest + text[len(kept) :][:1]


_PLAIN = bytes(range(0x20, 0x7F)) + b"\n"


def plain(lines: bytes) -> str:
    """Return whole lines if all can be shown unchanged, else nothing: 5 times faster."""
    if lines.translate(None, _PLAIN):
        return ""
    at = 0
    while len(lines) - at > LONGEST:
        at = lines.rfind(b"\n", at, at + LONGEST + 1) + 1
        if not at:
            return ""
    return lines.decode("ascii")


_COLOUR = r"\x1b\[[0-9;:]*m"
_ESCAPE = r"""
    \x1b (?: \[ [0-?]* [ -/]* [@-~]?                 # CSI: colours, cursor moves, erasing, modes
          | [\]PX^_] [^\x07\x1b]* (?:\x07|\x1b\\)?   # OSC (titles, links), DCS and the like
          | [ -/]* [0-~]? )                          # short ones, and a bare ESC
"""
_ESCAPES = re.compile(_ESCAPE, re.VERBOSE)
_ESCAPES_BUT_COLOURS = re.compile(f"(?!{_COLOUR}) {_ESCAPE}", re.VERBOSE)
# Tabs and ESC are dealt with apart. The last two break lines and turn the direction of text around.
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def clean(text: str, color: bool = False) -> str:
    """Return a line that a terminal only shows; with `color` its colours stay, and end with it."""
    if text.isprintable():
        return text
    text = (_ESCAPES_BUT_COLOURS if color else _ESCAPES).sub("", text)
    if not text.isprintable():
        text = _CONTROLS.sub(_picture, text).expandtabs()
    return text + "\x1b[0m" if "\x1b" in text else text


def _picture(control: re.Match[str]) -> str:
    """Return one visible character, such as ␀ for NUL."""
    code = ord(control[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"


def tail(log: LogFile, lines: int, rank: int | None) -> list[str]:
    """Return the last lines of a node, or of one rank there, found from the end of the file.

    A rank that has said nothing within the last 16 MiB of the log has no last lines here.
    """
    if lines < 1:
        return []
    end = log.size()
    window = _BLOCK
    while True:
        start = max(0, end - window)
        settle = start == 0 or window == _TAIL_LOOKS_BACK
        last, sure = _last_lines(log, start, end, lines, rank, cut=not settle)
        if settle or sure:
            return last
        window = min(window * 8, _TAIL_LOOKS_BACK)


def last_begin(log: LogFile, lines: int, rank: int | None) -> int:
    """Return where the last lines of a node begin, or of one rank there, to be read on from there.

    Of a rank that has said less within the last 16 MiB it is where these begin.
    """
    end, window = log.size(), _BLOCK
    while True:
        start = max(0, end - window)
        reader = LogReader(log, start=start)
        begins: deque[int] = deque([start], maxlen=lines + 1)  # of lines; the last one has no end
        while reader.position < end:
            at = reader.position
            pieces = reader.read(min(1 << 20, end - at))
            if not pieces:  # the file shrank: nobody does that, but it must not hang us
                break
            for stream, data in pieces:
                if rank is None or stream == str(rank):
                    ends = (match.end() for match in re.finditer(rb"\n", data))
                    begins.extend(at + offset for offset in ends)
                at += len(data)
        if len(begins) > lines and begins[0] > start:
            return begins[0]
        if start == 0 or window == _TAIL_LOOKS_BACK:
            return start
        window = min(window * 8, _TAIL_LOOKS_BACK)


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


def _last_lines(
    log: LogFile, start: int, end: int, lines: int, rank: int | None, *, cut: bool
) -> tuple[list[str], bool]:
    """Return the last lines of log[start:end], and whether they are all there and whole.

    With `cut`, the first line of each stream is taken for one that began before `start`. It is left
    out with all before it, so that what is found has no hole.
    """
    reader = LogReader(log, start=start)
    splitters: dict[str, LineSplitter] = {}
    whole: set[str] = set()
    last: deque[str] = deque(maxlen=lines)
    while reader.position < end:
        pieces = reader.read(min(1 << 20, end - reader.position))
        if not pieces:  # the file shrank: nobody does that, but it must not hang us
            break
        for stream, data in pieces:
            if rank is not None and stream != str(rank):
                continue
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
