"""The memory and the time that keeping states costs, and how often that is affordable."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.common import text
from orchestrator.common.text import Say
from orchestrator.engine.ranks.ranks import free_host_memory

KEPT_FREE = 0.1  # of what is free now: for others, and for what is not counted
COST = 0.03  # of the training: the most that is spent where nobody has said how often
MEASURED_STATES = 3  # before it is decided how often


def short_of(where: Path, need: int, name: str) -> str:
    """Say what is lacking for so many bytes, beside those that our files have already."""
    have = sum(path.stat().st_blocks * 512 for path in where.glob(f"{name}.*.[01]"))
    free = {"free there": shutil.disk_usage(where).free, "available": free_host_memory()}
    what, least = min(free.items(), key=lambda item: item[1])
    if need - have <= least * (1 - KEPT_FREE):
        return ""
    return (
        f"two states of this node's ranks take {text.size(need)} of memory in {where}, and"
        f" {text.size(least + have)} are {what} on {os.uname().nodename}"
    )


def affordable(measures: Sequence[Sequence[float]]) -> int:
    """Say every how many steps a state is to be kept, so that it costs what COST allows at most."""
    every = []
    for stall, busy, seconds in measures:
        step = max(seconds - stall, 1e-6)
        every.append(max(1, math.ceil(stall / (COST * step)), math.ceil(busy / step)))
    return min(every)


class Pace:
    """Says after which steps a state is kept, and counts what that took."""

    def __init__(self, every: int | None) -> None:
        self.every = every  # None until it is measured what a state costs
        self.kept = 0
        self.stalls: list[float] = []  # seconds for which training waited, of each state
        self.lap, self.step_seconds = time.perf_counter(), 0.0
        self.measures: list[list[float]] = []  # of each state: stall, all of it, a step

    def begin_step(self) -> None:
        now = time.perf_counter()
        self.lap, self.step_seconds = now, now - self.lap

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
        if self.kept < 2:
            return ""
        mean = sum(self.stalls[1:]) / len(self.stalls[1:])
        return (f"{self.kept} states were kept in memory; training waited {mean * 1e3:,.1f} ms"
                " for each")  # fmt: skip
