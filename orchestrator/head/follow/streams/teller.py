"""Makes metrics rows of one rank's output, and keeps what is known of it for the next head.

Apart from printed.py, as the patterns take 20 ms to compile, and a job may print nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator.records.metrics.step_lines import StepReader

# A progress bar returns to the beginning of its line with \r.
ENDS = re.compile(rb"[\r\n]+")
# The last bytes of a line that are read.
LONGEST_LINE = 2000


@dataclass
class Teller:
    """The parser of one rank's output: its incomplete last line and its last steps."""

    rank: int
    rest: bytes = b""
    # The time and the number of its first step.
    first: tuple[float, int] | None = None
    # The last step in the file by the name of the loss.
    written: dict[str, int] = field(default_factory=dict)
    # The number of steps whose loss is NaN or infinite.
    lost_steps: int = 0
    reader: StepReader = field(default_factory=StepReader)

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


@dataclass(frozen=True)
class State:
    """The state of a reader on disk: how far it has read a log, and what it made of it."""

    attempt: int
    # The offset in the log up to which it has read.
    offset: int
    # The sizes of the metrics files at this offset, by rank.
    sizes: Mapping[int, int]
    tellers: dict[str, Teller]
