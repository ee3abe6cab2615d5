"""Reads what one rank prints: the rows of metrics that its lines tell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from orchestrator.records.metrics.step_lines import LONGEST_CHARACTERS, StepReader

ENDS = re.compile(rb"[\r\n]+")  # a progress bar begins again with \r


class Teller:
    """One rank: the line that has no end yet, and where it was."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.rest = b""
        self.reader = StepReader()
        self.first: tuple[float, int] | None = None  # when its first step was seen, and which
        self.written: dict[str, int] = {}  # the last step of each loss in its file
        self.lost_steps = 0  # whose loss is NaN or infinite

    def lines(self, data: bytes) -> Iterator[str]:
        *whole, self.rest = ENDS.split(self.rest + data)
        self.rest = self.rest[-LONGEST_CHARACTERS:]
        for line in whole:
            yield line.decode(errors="replace")

    def rows(self, data: bytes, at: float) -> Iterator[str]:
        """Yield the rows that more of its output tells, which was printed at that time."""
        for text in self.lines(data):
            line = self.reader.values(text)
            step, steps = line.get("step", -1), line.pop("steps", None)
            for name in ("loss", "val_loss"):  # a progress bar shows the same step many times
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
