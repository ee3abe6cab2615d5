"""Note what this attempt's time went into, in outputs/time_spent.jsonl: a line now and then.

Rank 0 writes. Each line has all that is known so far, so the last one of an attempt is enough,
however it ends. What the times of all attempts come to is reckoned by records/goodput.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

EVERY = 2.0  # seconds between two lines: what a failure may leave untold
BEGAN = time.time()  # the engine is there: what came before was the start
NAME = "time_spent.jsonl"


class Account:
    """One per process; several trainings of one program add up."""

    def __init__(self) -> None:
        experiment = os.environ.get("ORCHESTRATOR_EXPERIMENT")
        first = os.environ.get("RANK", "0") == "0"
        self.path = Path(experiment, "outputs", NAME) if experiment and first else None
        self.attempt = int(os.environ.get("ORCHESTRATOR_ATTEMPT", "1"))
        self.trains: float | None = None  # since when
        self.first = self.step = 0
        self.data = self.checkpoints = 0.0  # seconds for which the training waited
        self.told = 0.0

    def begin(self, step: int) -> None:
        """Note that the first step begins, after so many of earlier attempts."""
        if self.trains is None:
            self.trains, self.first = time.time(), step
        self.step = step
        self.write()

    def after_step(self, step: int, data: float) -> None:
        self.step = step
        self.data += data
        if time.monotonic() - self.told >= EVERY:
            self.write()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.checkpoints += time.monotonic() - began

    def write(self) -> None:
        self.told = time.monotonic()
        if self.path is None:
            return
        line = {
            "attempt": self.attempt,
            "began": BEGAN,
            "trains": self.trains,
            "first": self.first,
            "time": time.time(),
            "step": self.step,
            "data": round(self.data, 4),
            "checkpoints": round(self.checkpoints, 4),
        }
        with contextlib.suppress(OSError):  # a full disk costs the account, never the run
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                file.write(json.dumps(line).encode("ascii") + b"\n")


@functools.cache
def of_process() -> Account:
    return Account()
