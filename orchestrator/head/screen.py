"""Log lines -> the user's terminal or pipe: a prefix per node and rank, progress bars that move.

Used by one thread only, as writing waits while a terminal is paused (Ctrl-S). That holds up nobody
else: the followers write to files, and this reads those.
"""

from __future__ import annotations

import io
import os
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

from orchestrator.head.logs import NO_RANK, LineSplitter, LogFile, LogReader, clean

FRAME = 0.05  # seconds between two paintings of a terminal
BARS = 8  # progress bars shown at a time
FAR_BEHIND = 8 << 20  # bytes; no one reads a terminal that runs through this, so skip ahead
_SHOW_AFTER_SKIP = 64 << 10
_BYTES_PER_PUMP = 1 << 20
_STALE = 5.0  # seconds without a move after which a bar gives way to those that move
_COLORS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


@dataclass
class _Stream:
    """One rank (or a node's own words) on the screen."""

    name: str
    splitter: LineSplitter
    moved: float = 0.0


@dataclass
class _Node:
    number: int
    reader: LogReader
    streams: dict[str, _Stream] = field(default_factory=dict)


class Screen:
    """Shows what grows in the logs. `pump` it whenever they grew, until it returns False."""

    def __init__(
        self,
        logs: Sequence[LogFile],
        out: TextIO,
        *,
        tty: bool,
        color: bool,
        quiet: bool,
        node: int | None = None,
        rank: int | None = None,
        ranks: int | None = None,  # how many the job has, if known: aligns from the first line on
    ) -> None:
        self.broken = False  # nobody reads us any more, as in `| head`: nothing is written
        self._out = out
        self._tty = tty and os.environ.get("TERM") != "dumb"
        self._color = color and self._tty and not os.environ.get("NO_COLOR")
        self._quiet = quiet
        self._only = None if rank is None else str(rank)
        shown = [log for log in logs if node is None or log.node == node]
        self._nodes = [_Node(log.node, LogReader(log)) for log in shown]
        self._node_width = max((len(f"node{log.node}") for log in shown), default=0)
        self._rank_width = len(f" rank{ranks - 1}") if ranks else 0
        self._rows: list[str] = []  # the live area as it is on the terminal now
        self._painted = 0.0
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="replace")  # a bar of █ must not end us in a Latin-1 terminal

    def pump(self) -> bool:
        """Show what is new, about 1 MiB of it at most; False when there was nothing.

        On a terminal it waits until 1/20 s after the last time, so that what moves can be read.
        """
        behind = 0 if self._quiet or self.broken else self._behind()
        if not behind:
            return False
        if self._tty:
            time.sleep(max(0.0, self._painted + FRAME - time.monotonic()))
            if behind > FAR_BEHIND:
                self.catch_up()
        share = max(1 << 14, _BYTES_PER_PUMP // len(self._nodes))
        self._paint("".join(self._news(node, share) for node in self._nodes))
        return True

    def say(self, text: str) -> None:
        """Words of our own, above the live area."""
        lines = (clean(line, self._color) for line in text.split("\n"))
        self._paint("".join(f"{line}\n" for line in lines))

    def catch_up(self) -> None:
        """Leave out all but the last 64 KiB of each log, and say so."""
        for node in self._nodes:
            skipped = node.reader.skip_near_end(_SHOW_AFTER_SKIP)
            if skipped:
                node.streams.clear()
                path = node.reader.log.text
                self.say(f"node{node.number}: {_amount(skipped)} not shown, in full in {path}")

    def close(self) -> None:
        """Show unfinished lines as they are and take the live area away. The logs stay readable."""
        text = ""
        for node in self._nodes:
            for stream in node.streams.values():
                text += self._lines(node, stream, stream.splitter.flush())
        self._paint(text)

    def _behind(self) -> int:
        return sum(node.reader.behind() for node in self._nodes)

    def _news(self, node: _Node, limit: int) -> str:
        """The finished lines of one node, as printed; its progress bars take note of their move."""
        text = []
        for name, data in node.reader.read(limit):
            if self._only not in (None, name):
                continue
            stream = node.streams.get(name)
            if stream is None:
                stream = node.streams[name] = _Stream(name, LineSplitter(self._color))
            stream.moved = time.monotonic()
            text.append(self._lines(node, stream, stream.splitter.feed(data)))
        return "".join(text)

    def _lines(self, node: _Node, stream: _Stream, lines: list[str]) -> str:
        if not lines:
            return ""
        prefix = self._tint(node, self._prefix(node, stream))
        return prefix + f"\n{prefix}".join(lines) + "\n"

    def _prefix(self, node: _Node, stream: _Stream) -> str:
        rank = "" if stream.name == NO_RANK else f" rank{stream.name}"
        self._rank_width = max(self._rank_width, len(rank))
        name = f"node{node.number}"
        return f"{name:<{self._node_width}}{rank:<{self._rank_width}} | "

    def _tint(self, node: _Node, text: str) -> str:
        color = _COLORS[node.number % len(_COLORS)]
        return f"\x1b[{color}m{text}\x1b[0m" if self._color else text

    def _live_rows(self) -> list[str]:
        bars = self._bars() if self._tty else []
        if not bars:
            return []
        columns, height = _terminal_size(self._out)
        most = max(2, min(BARS, height // 2))
        shown = bars if len(bars) <= most else bars[: most - 1]
        rows = []
        for node, stream in shown:
            prefix = self._prefix(node, stream)
            row = fit(prefix + stream.splitter.live, columns - 1)
            rows.append(self._tint(node, row[: len(prefix)]) + row[len(prefix) :])
        if len(bars) > len(shown):
            rows.append(fit(f"(+{len(bars) - len(shown)} more)", columns - 1))
        return rows

    def _bars(self) -> list[tuple[_Node, _Stream]]:
        """Those that move before those that stopped, else by node and rank: each stays in place."""
        now = time.monotonic()
        bars = [
            (now - stream.moved > _STALE, node.number, _rank_order(name), node, stream)
            for node in self._nodes
            for name, stream in node.streams.items()
            if stream.splitter.live
        ]
        return [bar[3:] for bar in sorted(bars, key=lambda bar: bar[:3])]

    def _paint(self, text: str) -> None:
        """Print `text` above the live area, in one write so that nothing flickers."""
        rows = self._live_rows()
        if not self.broken and (text or rows != self._rows):
            erase = ""
            if self._rows:
                up = len(self._rows) - 1
                erase = (f"\x1b[{up}A" if up else "") + "\r\x1b[J"
            try:
                self._out.write(erase + text + "\n".join(rows))
                self._out.flush()
            except OSError:  # EPIPE, or EIO from a terminal that was closed: the job goes on
                self.broken = True
        self._rows = rows
        self._painted = time.monotonic()


def fit(text: str, columns: int) -> str:
    """As much of the beginning of `text` as fits into so many columns of a terminal."""
    if text.isascii():
        return text[: max(0, columns)]
    used = 0
    for at, character in enumerate(text):
        used += _columns(character)
        if used > columns:
            return text[:at]
    return text


def _columns(character: str) -> int:
    if unicodedata.east_asian_width(character) in "WF":
        return 2
    return 0 if unicodedata.category(character) in ("Mn", "Me", "Cf") else 1


def _rank_order(stream: str) -> int:
    return -1 if stream == NO_RANK else int(stream)


def _amount(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size / (1 << 10):.0f} KiB"


def _terminal_size(out: TextIO) -> tuple[int, int]:
    """Asked at each painting, so a resized terminal needs no signal; not from a stale $COLUMNS."""
    try:
        columns, height = os.get_terminal_size(out.fileno())
    except (OSError, ValueError):  # not a terminal after all
        columns, height = 0, 0
    return columns or 80, height or 24
