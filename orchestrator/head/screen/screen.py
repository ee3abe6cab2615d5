"""Shows log lines on a terminal or pipe: a prefix per node and rank, and live progress bars.

Only one thread uses it, as a write blocks while a terminal is paused (Ctrl-S). Other threads are
not blocked: the followers write to files, and this reads those.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from orchestrator.common.text import format_bytes, plural
from orchestrator.head.screen.lines import LineSplitter, clean_line, fit_columns, plain_lines
from orchestrator.head.screen.log_reader import GOODBYE, NO_RANK, LogFile, LogReader, last_begin
from orchestrator.head.screen.output import OURS, is_output_full
from orchestrator.head.screen.styles import DIM, OF_NODES, style_text
from orchestrator.head.screen.tracebacks import HeldStack

# The least interval between two updates of a terminal.
FRAME_SECONDS = 0.05
# The most progress bars that are shown at a time.
BARS = 8
# A terminal that is further behind skips ahead.
FAR_BEHIND_BYTES = 8 << 20
_SHOW_AFTER_SKIP = 64 << 10
_BYTES_PER_PUMP = 1 << 20
# A bar without a change for so long is placed after those that change.
_STALE_SECONDS = 5.0
# Harmless remarks that torch prints in each job; they are in the log only.
# In torch 2.8 and 2.9 gloo reports the peers connected so far; the engine's groups connect later.
NOISE = (
    *(b"[c10d] The hostname of the client socket cannot be retrieved", b"USDT:"),
    *(b" peer ranks. Expected number of connected peer ranks is : ", b" is NOT connected to: ["),
)
# The interval at which held lines and the status row are checked.
TICK_SECONDS = 0.5


@dataclass
class _Stream:
    """One rank (or the node's own messages) on the screen."""

    node: int
    rank: int | None
    splitter: LineSplitter
    prefix: str = ""
    held: HeldStack = field(default_factory=HeldStack)
    moved: float = 0.0

    @property
    def order(self) -> tuple[int, int]:
        return self.node, -1 if self.rank is None else self.rank


@dataclass
class _Node:
    number: int
    reader: LogReader
    # Streams by their name in the log.
    streams: dict[str, _Stream] = field(default_factory=dict)


class Screen:
    """Shows the new lines of logs. Call pump() after the logs grew, until it returns False."""

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
        # The number of ranks, if known: aligns the prefixes from the first line on.
        ranks: int | None = None,
        # Whether tracebacks that may end a rank are held back.
        folds: bool = False,
    ) -> None:
        # True if the reader has closed the output, as in `| head`: nothing is written then.
        self.broken = False
        self._out = out
        self._tty = tty and os.environ.get("TERM") != "dumb"
        self._color = color
        self.quiet = quiet
        self._only = None if rank is None else str(rank)
        shown = [log for log in logs if node is None or log.node == node]
        self._nodes = [_Node(log.node, LogReader(log)) for log in shown]
        self._node_width = max((len(f"node{log.node}") for log in shown), default=0)
        self._rank_width = len(f" rank{ranks - 1}") if ranks else 0
        # The rows of the live area on the terminal.
        self._rows: list[str] = []
        self._painted = 0.0
        self._folds = folds
        # Returns the last row for a number of columns.
        self.status: Callable[[int], str] | None = None
        self._status_row = ""
        if isinstance(out, io.TextIOWrapper):
            # reconfigure() flushes pending output first, which may fail.
            with contextlib.suppress(OSError):
                # A bar of █ must not raise an error in Latin-1.
                out.reconfigure(errors="replace")

    def pump(self) -> bool:
        """Show new output, at most about 1 MiB; return False if there was none.

        On a terminal it waits until 1/20 s after the last update, so that live rows can be read.
        """
        behind = sum(node.reader.behind() for node in self._nodes)
        if not behind or self.quiet or self.broken:
            return False
        if self._tty:
            time.sleep(max(0.0, self._painted + FRAME_SECONDS - time.monotonic()))
            if behind > FAR_BEHIND_BYTES:
                self.catch_up()
        share = max(1 << 14, _BYTES_PER_PUMP // len(self._nodes))
        self._paint("".join(text for node in self._nodes for text in self._news(node, share)))
        return True

    def say(self, text: str) -> None:
        """Print a message of our own above the live area."""
        if text.startswith(OURS):
            text = style_text(OURS, DIM) + text[len(OURS) :]
        lines = (clean_line(line, self._color) for line in text.split("\n"))
        self._paint("".join(f"{line}\n" for line in lines))

    def catch_up(self) -> None:
        """Skip all but the last 64 KiB of each log, and print how much was skipped."""
        for node in self._nodes:
            skipped = node.reader.skip_near_end(_SHOW_AFTER_SKIP)
            if skipped:
                node.streams.clear()
                path = node.reader.log.text
                self.say(
                    f"node{node.number}: {format_bytes(skipped, binary=True)} not shown, in full in"
                    f" {path}"
                )

    def skip_to(self, positions: Mapping[int, int]) -> None:
        """Begin at these positions of the nodes' logs; a log without one begins at its end."""
        for node in self._nodes:
            size = node.reader.log.size()
            node.reader.skip_to(min(positions.get(node.number, size), size))

    def end_here(self) -> None:
        """Limit the output to the current contents of the logs."""
        for node in self._nodes:
            node.reader.end_here()

    def begin_near_end(self, lines: int) -> None:
        """Begin with the last `lines` lines of each node, or of the one rank that is shown."""
        rank = None if self._only is None else int(self._only)
        for node in self._nodes:
            node.reader.skip_to(last_begin(node.reader.log, lines, rank))

    @property
    def waits(self) -> bool:
        """Return True if tick() has work without new output: a status row or held lines."""
        return bool(self._tty and self.status) or any(each.held.lines for each in self._streams())

    def tick(self) -> None:
        """Show held lines whose time is over, and update the status row."""
        now = time.monotonic()
        if self._tty and self.status is not None:
            row = self.status(_terminal_size(self._out)[0] - 1)
            self._status_row = clean_line(row, self._color)
        due = ((stream, stream.held.due(now)) for stream in list(self._streams()))
        self._paint("".join(self._lines(stream, lines) for stream, lines in due))

    @property
    def positions(self) -> dict[int, int]:
        """Return how many bytes of each node's log were shown, in whole lines."""
        return {node.number: node.reader.line_start for node in self._nodes}

    def close(self, *, fold: bool = False) -> int:
        """Show unfinished lines and remove the live area. The logs stay readable.

        With `fold`, held tracebacks are not shown. Return the number of ranks that had one.
        """
        streams = sorted(self._streams(), key=lambda stream: stream.order)
        folded = [stream for stream in streams if fold and stream.held.lines]
        rests = [(stream, [*stream.held.rest(), *stream.splitter.flush()]) for stream in streams]
        self.status, self._status_row = None, ""
        text = (self._lines(stream, lines) for stream, lines in rests if stream not in folded)
        self._paint("".join(text))
        return sum(stream.rank is not None for stream in folded)

    def _streams(self) -> Iterator[_Stream]:
        return (stream for node in self._nodes for stream in node.streams.values())

    def _news(self, node: _Node, limit: int) -> Iterator[str]:
        """Yield the finished lines of one node with prefixes, and update its progress bars."""
        now = time.monotonic()
        for name, data in node.reader.read(limit):
            if self._only not in (None, name) or name == GOODBYE:
                # torchrun's final messages (a lost store) are not about the job.
                continue
            stream = node.streams.get(name) or self._new_stream(node, name)
            stream.moved = now
            yield from self._shown(stream, data)

    def _shown(self, stream: _Stream, data: bytes) -> Iterator[str]:
        """Yield lines of a stream with its prefix; plain lines, the usual case, as one block."""
        if any(noise in data for noise in NOISE):
            lines = stream.splitter.feed(data)
            yield self._lines(stream, [line for line in lines if not of_torch_alone(line)])
            return
        # The first line may have begun in earlier data, so it goes through the splitter.
        first = data.find(b"\n") + 1
        yield self._lines(stream, self._wanted(stream, stream.splitter.feed(data[:first])))
        data = data[first:]
        if self._folds and stream.held.concerns(data):
            yield self._lines(stream, self._wanted(stream, stream.splitter.feed(data)))
            return
        last = data.rfind(b"\n") + 1
        block = plain_lines(data[:last])
        if block:
            prefix = self._tint(stream, stream.prefix)
            yield from (prefix, block[:-1].replace("\n", f"\n{prefix}"), "\n")
            data = data[last:]
        yield self._lines(stream, stream.splitter.feed(data))

    def _wanted(self, stream: _Stream, lines: list[str]) -> list[str]:
        """Return the lines to show now, without a traceback that may be the last output."""
        if not self._folds:
            return lines
        # torch puts this before each line of a traceback.
        own = f"[rank{stream.rank}]: "
        return [line.removeprefix(own) for line in stream.held.shown(lines, stream.moved)]

    def _new_stream(self, node: _Node, name: str) -> _Stream:
        rank = None if name == NO_RANK else int(name)
        stream = _Stream(node.number, rank, LineSplitter(self._color))
        node.streams[name] = stream
        if rank is not None:
            self._rank_width = max(self._rank_width, len(f" rank{rank}"))
        # All prefixes change, as the new one may be the widest.
        for each in self._streams():
            by_node = f"node{each.node}".ljust(self._node_width)
            by_rank = "" if each.rank is None else f" rank{each.rank}"
            each.prefix = f"{by_node}{by_rank.ljust(self._rank_width)} | "
        return stream

    def _lines(self, stream: _Stream, lines: list[str]) -> str:
        if not lines:
            return ""
        prefix = self._tint(stream, stream.prefix)
        return prefix + f"\n{prefix}".join(lines) + "\n"

    def _tint(self, stream: _Stream, text: str) -> str:
        color = OF_NODES[stream.node % len(OF_NODES)]
        return f"\x1b[{color}m{text}\x1b[0m" if self._color else text

    def _live_rows(self) -> list[str]:
        if not self._tty:
            return []
        bars = [] if self.quiet else self._bars()
        below = [self._status_row] if self._status_row else []
        columns, height = _terminal_size(self._out)
        most = max(2, min(BARS, height // 2))
        shown = bars if len(bars) <= most else bars[: most - 1]
        rows = []
        for stream in shown:
            row = fit_columns(stream.prefix + stream.splitter.live, columns - 1)
            rows.append(self._tint(stream, row[: len(stream.prefix)]) + row[len(stream.prefix) :])
        if len(bars) > len(shown):
            rows.append(fit_columns(f"(+{len(bars) - len(shown)} more)", columns - 1))
        return rows + below

    def _bars(self) -> list[_Stream]:
        """Return the progress bars: active ones first, then by node and rank."""
        now = time.monotonic()
        bars = (stream for stream in self._streams() if stream.splitter.live)
        return sorted(bars, key=lambda bar: (now - bar.moved > _STALE_SECONDS, bar.order))

    def _paint(self, text: str) -> None:
        """Print `text` above the live area, in one write to avoid flicker."""
        rows = self._live_rows()
        if not self.broken and (text or rows != self._rows):
            up = f"\x1b[{len(self._rows) - 1}A" if self._rows[1:] else ""
            erase = f"{up}\r\x1b[J" if self._rows else ""
            try:
                self._out.write(erase + text + "\n".join(rows))
                self._out.flush()
            except OSError as error:
                # EPIPE, or EIO from a closed terminal: the job continues.
                self.broken = True
                is_output_full(error)
        self._rows = rows
        self._painted = time.monotonic()


def of_torch_alone(line: str) -> bool:
    """Return True if a line is one of torch's remarks in NOISE, which are not shown."""
    return line.startswith(("[W", "USDT:", "[Gloo] Rank ")) and any(
        noise.decode() in line for noise in NOISE
    )


def _terminal_size(out: TextIO) -> tuple[int, int]:
    """Return the terminal's size now: no signal is needed, and no stale $COLUMNS is used."""
    try:
        columns, height = os.get_terminal_size(out.fileno())
    except (OSError, ValueError):
        # The output is not a terminal.
        columns, height = 0, 0
    return columns or 80, height or 24


# -- display ------------------------------------------------------------------------------------
# Runs the screen in a thread: a paused terminal or a slow pipe never delays the job.


class Display(threading.Thread):
    def __init__(self, screen: Screen) -> None:
        super().__init__(daemon=True, name="display")
        self.screen = screen
        self.messages: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.changed = threading.Event()
        self.muted = threading.Event()
        # True if tracebacks that are held at the end are not shown.
        self.fold = False

    def show(self, text: str) -> None:
        """Show a line of ours above the status line, in its turn."""
        self.messages.put(f"{OURS} {text}")
        self.changed.set()

    def grew(self) -> None:
        self.changed.set()

    def mute(self) -> None:
        """Show only the current contents of the logs: output after a failure repeats it."""
        if not self.muted.is_set():
            self.screen.end_here()
            self.muted.set()
            self.changed.set()

    def finish(self, *, fold: bool = False) -> None:
        """Show the rest and end the thread; with `fold`, held tracebacks are not shown."""
        self.fold = fold
        self.messages.put(None)
        self.changed.set()
        self.join()

    def run(self) -> None:
        last = False
        while not last:
            self.changed.wait(TICK_SECONDS if self.screen.waits else None)
            self.changed.clear()
            last = self._speak()
            while self.screen.pump():
                last = self._speak() or last
            if not last and not self.muted.is_set():
                self.screen.tick()
        folded = self.screen.close(fold=self.fold or self.muted.is_set())
        if folded and not self.muted.is_set():
            ranks = plural(folded, "rank")
            self.screen.say(f"{OURS} {ranks} ended with a traceback: orchestrator logs shows all")

    def _speak(self) -> bool:
        while True:
            try:
                text = self.messages.get_nowait()
            except queue.Empty:
                return False
            if text is None:
                return True
            self.screen.say(text)
