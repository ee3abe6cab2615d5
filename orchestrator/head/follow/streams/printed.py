"""Extract steps and losses from a program's output, for programs without metrics of their own.

Each rank whose lines contain a step and a loss gets a metrics file like those of a Trainer, in
`printed/` of the experiment. All readers of metrics show it: `top`, the report, trackers.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.common import files
from orchestrator.head.screen.log_reader import LogFile, LogReader
from orchestrator.records.metrics import trainers

LOOK_SECONDS = 1.0
# The most bytes that are read at once; a log that grows faster is read only at its end.
MOST_BYTES = 128 << 10
# The last bytes of a line that are read.
LONGEST_LINE = 2000
# The least bytes that are read at once, even with many nodes: enough for some lines.
LEAST_BYTES = 4 << 10


class Printed:
    """Reads the local log of one node from its current end on, as its follower appends to it."""

    def __init__(
        self, log: LogFile, experiment: Path, ranks: range, most: int = MOST_BYTES
    ) -> None:
        self.most = max(LEAST_BYTES, min(MOST_BYTES, most))
        self.reader = LogReader(log, start=log.size())
        self.outputs = experiment / "outputs"
        self.ranks = frozenset(map(str, ranks))
        self.tellers: dict[str, Teller] = {}
        self.looked = 0.0
        # The time of the next read if the log has grown.
        self.due = math.inf

    def grew(self) -> None:
        self.due = self.looked + LOOK_SECONDS

    def check(self, offset: float, *, last: bool = False) -> None:
        """Write the metrics of new lines; `offset`: the node's clock minus this machine's."""
        now = time.monotonic()
        if not last and now < self.due:
            return
        self.looked, self.due = now, math.inf
        if not self.reader.behind() or trainers.measured(self.outputs):
            return
        self.reader.skip_near_end(self.most)
        new: dict[str, list[str]] = {}
        for stream, data in self.reader.read(self.most):
            if stream in self.ranks:
                new.setdefault(stream, []).extend(self.rows_of(stream, data, time.time() + offset))
        for stream, lines in new.items():
            if lines:
                self.write(int(stream), "".join(lines))

    def rows_of(self, stream: str, data: bytes, at: float) -> Iterator[str]:
        if stream not in self.tellers:
            self.tellers[stream] = Teller(int(stream))
        return self.tellers[stream].rows(data, at)

    def write(self, rank: int, text: str) -> None:
        """Append to the rank's metrics file; on a full disk only these rows are lost."""
        path = trainers.printed(self.outputs) / trainers.file_name(rank)
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            files.add_lines(path, text.encode())


# A progress bar returns to the beginning of its line with \r.
ENDS = re.compile(rb"[\r\n]+")


class Teller:
    """The parser of one rank's output: its incomplete last line and its last steps."""

    def __init__(self, rank: int) -> None:
        # Its patterns take 20 ms to compile, and a job may print nothing.
        from orchestrator.records.metrics.step_lines import StepReader

        self.rank = rank
        self.rest = b""
        self.reader = StepReader()
        # The time and the number of its first step.
        self.first: tuple[float, int] | None = None
        # The last step in the file by the name of the loss.
        self.written: dict[str, int] = {}
        # The number of steps whose loss is NaN or infinite.
        self.lost_steps = 0

    def lines(self, data: bytes) -> Iterator[str]:
        *whole, self.rest = ENDS.split(self.rest + data)
        self.rest = self.rest[-LONGEST_LINE:]
        for line in whole:
            yield line.decode(errors="replace")

    def rows(self, data: bytes, at: float) -> Iterator[str]:
        """Yield the metrics rows of further output, which was printed at the time `at`."""
        for text in self.lines(data):
            line = self.reader.values(text)
            step, steps = line.get("step", -1), line.pop("steps", None)
            # A progress bar shows the same step many times.
            for name in ("loss", "val_loss"):
                if name in line and self.written.get(name) == step:
                    del line[name]
            if "loss" not in line and "val_loss" not in line:
                continue
            if "loss" in line and line["loss"] is None:
                self.lost_steps += 1
                line["lost_steps"] = self.lost_steps
            self.written |= dict.fromkeys(line.keys() & {"loss", "val_loss"}, step)
            if self.first is None or step < self.first[1]:
                self.first = (at, step)
            begun, first = self.first
            if steps is not None and steps >= step:
                line["steps"] = steps
                if step > first:
                    line["left_s"] = round((steps - step) * (at - begun) / (step - first), 1)
            yield json.dumps({"rank": self.rank, "time": round(at, 3), **line}) + "\n"
