"""Follows the log of a node as it grows, from its last lines on, for the live views."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.screen.lines import LineSplitter
from orchestrator.head.screen.log_reader import GOODBYE, LogFile, LogReader, last_begin
from orchestrator.records.experiment import RECORD, Experiment

KEPT_LINES = 400  # of one log, for whoever comes next
LONGEST_CHARACTERS = 2000  # of a line that is shown
BACK_BYTES = 1 << 16  # bytes from the end where a follower begins
BEHIND = 1 << 20  # what a job prints faster than that between two looks is left out
MOST_STREAMS = 1024

Stamp = tuple[int, int, int]
More = Callable[[], Sequence[str]]  # returns the lines that came since it was called last


@dataclass
class Tail:
    """The last lines of one node's log, or of a rank there, read once for everybody who looks."""

    log: LogFile
    rank: int | None = None
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
            if self.rank is None:
                self.reader.skip_near_end(BACK_BYTES)
            else:
                self.reader.skip_to(last_begin(log, KEPT_LINES, self.rank))

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
            self.add("-", "... the log starts from the beginning")
        if self.reader.behind() > BEHIND:
            left_out = self.reader.skip_near_end(BACK_BYTES)
            self.splitters.clear()
            self.add("-", f"... {left_out:,} bytes are left out here")
        for stream, data in self.reader.read(BEHIND):
            if stream == GOODBYE or (self.rank is not None and stream != str(self.rank)):
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


def tail_of(experiment: Experiment, node: int, rank: int | None = None) -> Tail | None:
    """Follow the log of a node, or of a rank there: of whichever machine has its place now."""
    stamp = stamp_of(experiment.path / RECORD)

    def moved() -> LogFile | None:
        nonlocal stamp
        if (now := stamp_of(experiment.path / RECORD)) == stamp:
            return None
        stamp = now
        return log_of(experiment, node)

    log = log_of(experiment, node)
    return None if log is None else Tail(log, rank, moved)


def stamp_of(path: Path) -> Stamp:
    status = path.lstat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def is_plain(path: Path) -> bool:
    """Tell whether a log is a file in its directory, and not a link to something else."""
    try:
        with files.opened(path.parent) as directory:
            status = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode)
