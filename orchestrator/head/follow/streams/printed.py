"""Writes down how far a program is that measures nothing for us, from what its ranks print.

Each rank whose lines tell a step and a loss gets a file of metrics like those of a Trainer, in
`printed/` of the experiment, and all that reads metrics shows it: `top`, the report, trackers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.common import files
from orchestrator.head.screen.log_reader import LogFile, LogReader
from orchestrator.records.metrics import trainers
from orchestrator.records.metrics.step_lines import LONGEST, Place, values

LOOK_SECONDS = 1.0  # between two looks
MOST = 128 << 10  # bytes of one look; of a log that grows faster, what came before is passed over
ENDS = re.compile(rb"[\r\n]+")  # a progress bar begins anew with \r


@dataclass
class Teller:
    """One rank: the line that has no end yet, and where it was."""

    rest: bytes = b""
    place: Place = field(default_factory=Place)
    first: tuple[float, int] | None = None  # when its first step was seen, and which
    written: int = -1  # the last step in its file

    def lines(self, data: bytes) -> Iterator[str]:
        *whole, self.rest = ENDS.split(self.rest + data)
        self.rest = self.rest[-LONGEST:]
        for line in whole:
            yield line.decode(errors="replace")


class Printed:
    """The log of one node, read beside its follower from where it is now on."""

    def __init__(self, log: LogFile, experiment: Path) -> None:
        self.reader = LogReader(log, start=log.size())
        self.outputs = experiment / "outputs"
        self.tellers: dict[str, Teller] = {}
        self.next_look = 0.0

    def look(self, offset: float, *, last: bool = False) -> None:
        """Write down what is new; `offset`: the node's clock minus ours."""
        now = time.monotonic()
        if not last and now < self.next_look:
            return
        self.next_look = now + LOOK_SECONDS
        if not self.reader.behind() or trainers.measured(self.outputs):
            return
        self.reader.skip_near_end(MOST)
        new: dict[str, list[str]] = {}
        for stream, data in self.reader.read(MOST):
            if stream.isdigit():
                new.setdefault(stream, []).extend(self.told(stream, data, time.time() + offset))
        for stream, lines in new.items():
            if lines:
                self.write(int(stream), "".join(lines))

    def told(self, stream: str, data: bytes, at: float) -> Iterator[str]:
        teller = self.tellers.setdefault(stream, Teller())
        for text in teller.lines(data):
            line = values(text, teller.place)
            if not line or (line["step"] == teller.written and "val_loss" not in line):
                continue  # a progress bar tells the same step many times
            step, steps = line["step"], line.pop("steps", None)
            teller.written = step
            if teller.first is None or step < teller.first[1]:
                teller.first = (at, step)
            begun, first = teller.first
            if steps is not None and steps >= step:
                line["steps"] = steps
                if step > first:
                    line["left_s"] = round((steps - step) * (at - begun) / (step - first), 1)
            yield json.dumps({"rank": int(stream), "time": round(at, 3), **line}) + "\n"

    def write(self, rank: int, text: str) -> None:
        """Append to the rank's file; a disk that is full loses no more than the curve."""
        path = trainers.printed(self.outputs) / trainers.file_name(rank)
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = files.open_to_append(path)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
