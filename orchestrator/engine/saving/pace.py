"""Decides how often a state is kept in memory: as often as the training affords."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from orchestrator.common.text import Say
from orchestrator.engine.ranks.ranks import gather

COST = 0.03  # of the training: the most that is spent where nothing says how often
MEASURED_STATES = 3  # before it is decided how often


def affordable(measures: Sequence[Sequence[float]]) -> int:
    """Return every how many steps a state is kept, so that it costs what COST allows at most."""
    every = []
    for stall, busy, seconds in measures:
        step = max(seconds - stall, 1e-6)
        every.append(max(1, math.ceil(stall / (COST * step)), math.ceil(busy / step)))
    return min(every)


class Pace:
    """Tells after which steps a state is kept, and counts what that took."""

    def __init__(self, every: int | None) -> None:
        self.every = every  # None until it is measured what a state costs
        self.stalls: list[float] = []  # seconds for which training waited, of each state
        self.lap, self.step_seconds = time.perf_counter(), 0.0
        self.measures: list[list[float]] = []  # of each state: stall, all of it, a step

    def begin_step(self) -> None:
        now = time.perf_counter()
        self.lap, self.step_seconds = now, now - self.lap

    def measure(self, busy: float) -> None:
        """Note what the last state took; all ranks go by the slowest."""
        mine = [self.stalls[-1], busy, self.step_seconds]
        self.measures.append([max(each) for each in zip(*gather(mine), strict=True)])

    def due(self, step: int, say: Say) -> bool:
        if self.every is None:
            if len(self.measures) < MEASURED_STATES:
                return True
            self.every = affordable(self.measures[1:])
            if self.every > 1:
                say(f"a state is kept in memory every {self.every} steps: more often would"
                    f" cost more than {COST:.0%} (checkpoint.memory_every)")  # fmt: skip
        return step % self.every == 0

    def summary(self) -> str:
        """Say what the states took; nothing where there were too few to tell."""
        if len(self.stalls) < 2:
            return ""
        mean = sum(self.stalls[1:]) / len(self.stalls[1:])
        return (f"{len(self.stalls)} states were kept in memory; training waited"
                f" {mean * 1e3:,.1f} ms for each")  # fmt: skip
