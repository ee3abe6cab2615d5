"""Follows the nodes' logs for all clients at once, and searches them."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from orchestrator.common import files
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.screen.lines import LineSplitter, clean
from orchestrator.head.screen.log_reader import GOODBYE, LogFile, LogReader, stream_at
from orchestrator.records.experiment import RECORD, Experiment
from orchestrator.views.dashboard.listing import is_plain, stamp_of

KEPT_LINES = 400  # of one log, for whoever comes next
LONGEST_CHARACTERS = 2000  # of a line that is shown
BACK_BYTES = 1 << 16  # bytes from the end where a follower begins
BEHIND = 1 << 20  # what a job prints faster than that between two looks is left out
MOST_STREAMS = 1024
BLOCK_BYTES = 1 << 20
HITS = 50  # of each node: the last ones
SEARCH_SECONDS = 10.0
LONGEST_WORD = 200


@dataclass
class Tail:
    """The last lines of one node's log, read once for everybody who follows it."""

    log: LogFile
    moved: Callable[[], LogFile | None] = lambda: None  # the log, where it may be another now
    lines: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    count: int = 0  # of all lines so far: the number of the next one

    def __post_init__(self) -> None:
        self.problem = ""
        self.begin(self.log)

    def begin(self, log: LogFile) -> None:
        self.log, self.reader = log, LogReader(log)
        self.splitters: dict[str, LineSplitter] = {}
        if is_plain(log.text):
            self.reader.skip_near_end(BACK_BYTES)

    def advance(self) -> bool:
        """Read what is new; tell whether there was anything."""
        before = self.count
        try:
            self.read()
        except OSError as error:
            if self.problem != (problem := error.strerror or "it cannot be read"):
                self.add("-", f"... {self.log.text.name}: {problem}")
            self.problem = problem
        return self.count > before

    def read(self) -> None:
        log = self.moved() or self.log
        if log.text != self.log.text:  # a later attempt has another machine there
            self.begin(log)
            self.add("-", f"... from here on {log.label}")
        if not is_plain(self.log.text):
            return
        if self.log.size() < self.reader.position:  # put aside: a job that was queued again
            self.begin(self.log)
            self.add("-", "... the log begins anew")
        if self.reader.behind() > BEHIND:
            left_out = self.reader.skip_near_end(BACK_BYTES)
            self.splitters.clear()
            self.add("-", f"... {left_out:,} bytes are left out here")
        for stream, data in self.reader.read(BEHIND):
            if stream == GOODBYE:
                continue  # as on a terminal: no news of a job that has ended well
            if len(self.splitters) > MOST_STREAMS:
                self.splitters.clear()
            splitter = self.splitters.setdefault(stream, LineSplitter())
            for line in splitter.feed(data):
                self.add(stream, line)

    def add(self, stream: str, line: str) -> None:
        self.lines.append((stream, line[:LONGEST_CHARACTERS]))
        self.count += 1

    def since(self, number: int) -> dict[str, Any]:
        """Return the lines from that number on, as far as they are kept."""
        first = self.count - len(self.lines)
        begin = max(number, first)
        shown = list(self.lines)[begin - first :]
        return {"next": self.count, "left_out": begin - number if number else 0, "lines": shown}


def log_of(experiment: Experiment, node: int) -> LogFile | None:
    """Return the log of one node of an experiment."""
    record = experiment.read_record()
    nodes = [each for each in record.nodes if each.index == node]
    return log_files(experiment, nodes)[0] if nodes else None


def tail_of(experiment: Experiment, node: int) -> Tail | None:
    """Follow the log of a node, whichever machine has its place in the attempt that runs."""
    stamp = stamp_of(experiment.path / RECORD)

    def moved() -> LogFile | None:
        nonlocal stamp
        if (now := stamp_of(experiment.path / RECORD)) == stamp:
            return None
        stamp = now
        return log_of(experiment, node)

    log = log_of(experiment, node)
    return None if log is None else Tail(log, moved)


# -- search -----------------------------------------------------------------------------------


def search(experiment: Experiment, word: str) -> dict[str, Any]:
    """Find a word in all nodes' logs: how often, and the last places of each node."""
    deadline = time.monotonic() + SEARCH_SECONDS
    wanted = re.compile(re.escape(word[:LONGEST_WORD].encode()), re.IGNORECASE)
    found, total, whole, unread = [], 0, True, []
    for log in log_files(experiment, experiment.read_record().nodes):
        if not is_plain(log.text):
            continue
        try:
            places, count, complete = places_in(log, wanted, deadline)
            found += [hit(log, offset, line) for offset, line in places]
        except OSError as error:
            unread.append(f"node {log.node} ({error.strerror})")
            continue
        total, whole = total + count, whole and complete
    return {
        **{"hits": found, "count": total, "whole": whole, "seconds": SEARCH_SECONDS},
        "unread": ", ".join(unread),
    }


def places_in(
    log: LogFile, wanted: re.Pattern[bytes], deadline: float
) -> tuple[deque[tuple[int, bytes]], int, bool]:
    """Return the last lines with the word and where they begin, and how many lines have it."""
    places: deque[tuple[int, bytes]] = deque(maxlen=HITS)
    count, at, rest = 0, 0, b""
    with files.open_plain(log.text) as file:
        while data := file.read(BLOCK_BYTES):
            if time.monotonic() > deadline:
                return places, count, False
            text = rest + data
            end = text.rfind(b"\n") + 1 or (len(text) if len(text) > BLOCK_BYTES else 0)
            count += search_text(text[:end], at, wanted, places)
            at, rest = at + end, text[end:]
    count += search_text(rest, at, wanted, places)
    return places, count, True


def search_text(
    text: bytes, at: int, wanted: re.Pattern[bytes], places: deque[tuple[int, bytes]]
) -> int:
    count, after = 0, 0
    while match := wanted.search(text, after):
        begin = text.rfind(b"\n", 0, match.start()) + 1
        end = text.find(b"\n", match.end())
        end = len(text) if end < 0 else end
        near = max(begin, match.start() - LONGEST_CHARACTERS // 2)
        places.append((at + begin, text[near : min(end, near + LONGEST_CHARACTERS)]))
        count, after = count + 1, end
    return count


def hit(log: LogFile, offset: int, line: bytes) -> dict[str, Any]:
    text = clean(line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2])
    return {"node": log.node, "rank": stream_at(log, offset), "line": text}
