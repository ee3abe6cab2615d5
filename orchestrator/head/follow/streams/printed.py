"""Extract steps and losses from a program's output, for programs without metrics of their own.

Each rank whose lines contain a step and a loss gets a metrics file like those of a Trainer, in
`printed/` of the experiment. All readers of metrics show it: `top`, the report, trackers.

The files depend on the log alone, not on its reader. A head that takes over begins at the offset
that is on disk, with what was made of the log up to there: it cuts off later rows and makes them
again from the same bytes, with the same times.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.common import files
from orchestrator.head.screen.log_reader import LogFile, LogReader
from orchestrator.protocol.message import decode_value, parse_object, to_json
from orchestrator.records.metrics import trainers

if TYPE_CHECKING:
    from orchestrator.head.follow.streams.teller import Teller

LOOK_SECONDS = 1.0
# The pause between two writes of the state.
SAVE_SECONDS = 5.0
# The most bytes that are read at once.
MOST_BYTES = 128 << 10
# The least bytes that are read at once, even with many nodes: enough for some lines.
LEAST_BYTES = 4 << 10
# A reader that is further behind skips to this distance from the end of the log.
FURTHEST_BEHIND_BYTES = 16 << 20


class Printed:
    """Reads the local log of one node as its follower appends to it.

    `begin` is the offset at which this attempt's log begins, after those of earlier attempts.
    """

    def __init__(
        self,
        log: LogFile,
        experiment: Path,
        ranks: range,
        most: int = MOST_BYTES,
        *,
        attempt: int = 1,
        begin: int = 0,
    ) -> None:
        self.log, self.attempt, self.begin = log, attempt, begin
        self.most = max(LEAST_BYTES, min(MOST_BYTES, most))
        self.outputs = experiment / "outputs"
        self.folder = trainers.printed_metrics_directory(self.outputs)
        self.state = self.folder / f"node_{log.node}.json"
        self.paths = {str(rank): self.folder / trainers.file_name(rank) for rank in ranks}
        self.reader: LogReader | None = None
        self.tellers: dict[str, Teller] = {}
        self.looked = self.saved = 0.0
        # The time of the next read; the first one goes on where the last head stopped.
        self.due = 0.0

    def grew(self) -> None:
        self.due = min(self.due, self.looked + LOOK_SECONDS)

    def check(self, offset: float, *, last: bool = False) -> None:
        """Write the metrics of new lines; `offset`: the node's clock minus this machine's."""
        now = time.monotonic()
        if not last and now < self.due:
            return
        self.looked, self.due = now, math.inf
        if not self.log.size() or trainers.list_metrics_files(self.outputs):
            return
        if self.reader is None:
            self.reader = LogReader(self.log, start=self.restored())
        self.reader.skip_near_end(FURTHEST_BEHIND_BYTES)
        while self.reader.behind():
            self.read(self.reader, offset)
            if not last:
                break
        if self.reader.behind():
            self.grew()
        if self.saved and now >= self.saved + SAVE_SECONDS:
            self.save(self.reader.position, self.tellers)

    def read(self, reader: LogReader, offset: float) -> None:
        # Imported at the first output, as the patterns take 20 ms to compile.
        from orchestrator.head.follow.streams.teller import Teller

        new: dict[str, list[str]] = {}
        for (stream, data), at in reader.read_timed(self.most):
            if stream in self.paths:
                teller = self.tellers.setdefault(stream, Teller(int(stream)))
                rows = teller.rows(data, at or time.time() + offset)
                new.setdefault(stream, []).extend(rows)
        for stream, lines in new.items():
            if lines:
                self.write(self.paths[stream], "".join(lines))

    def write(self, path: Path, text: str) -> None:
        """Append to a rank's metrics file; on a full disk only these rows are lost."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if not self.saved:
                self.save(self.begin, {})
            files.add_lines(path, text.encode())

    # -- what is on disk for the next head ---------------------------------------------------------

    def save(self, offset: int, tellers: dict[str, Teller]) -> None:
        """Write how far the log is read, and what was made of it."""
        from orchestrator.head.follow.streams.teller import State

        sizes = {int(rank): size_of(path) for rank, path in self.paths.items()}
        with contextlib.suppress(OSError):
            files.replace_file(self.state, to_json(State(self.attempt, offset, sizes, tellers)))
            self.saved = time.monotonic()

    def restored(self) -> int:
        """Return the offset to begin at, with the parsers and the rows that belong to it."""
        if not self.state.exists():
            return self.begin
        from orchestrator.head.follow.streams.teller import State

        try:
            state = decode_value(State, parse_object(files.read_plain(self.state)))
        except (OSError, ValueError):
            # What its rows are made of is not known: none is written twice.
            return self.log.size()
        if state.attempt != self.attempt:
            return self.begin
        for rank, path in self.paths.items():
            size = state.sizes.get(int(rank), 0)
            if size_of(path) > size:
                os.truncate(path, size)
        self.tellers, self.saved = state.tellers, time.monotonic()
        return state.offset


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
