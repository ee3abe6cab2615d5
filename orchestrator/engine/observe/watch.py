"""Let rank 0 know what each rank measured of itself, and say once who holds the others up.

One small message per rank every few steps, beside the training; which rank is slow is decided in
stragglers.py. Whoever is named is told to the log, and to the supervisor, so that the head knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.config.schema import Config
from orchestrator.engine.observe import stragglers
from orchestrator.engine.observe.phases import Phases
from orchestrator.engine.observe.stragglers import Detector, Part, Slow, Step
from orchestrator.engine.ranks.ranks import Ranks, own_group, wait_as_long

EVERY = 4  # steps that are told at once
PER_STEP, BESIDE = 4, 4  # numbers in a message
SNMP = Path("/proc/self/net/snmp")  # of this network namespace


class Watch:
    """One per training of several ranks. Every rank calls after_step() after the same steps."""

    def __init__(self, config: Config, ranks: Ranks, phases: Phases, step: int) -> None:
        self.ranks, self.phases = ranks, phases
        self.group = own_group("stragglers", dist.group.WORLD)
        wait_as_long(config, self.group)
        self.detector = Detector(step + 1, [node for node, _ in ranks.nodes])
        self.steps: list[Step] = []
        self.before: tuple[float, float, float] | None = None  # no times of the first step
        self.segments = segments()
        self.writes = self.write_seconds = 0.0  # of checkpoints, told by whoever writes them
        self.inbox: list[Tensor] | None = None
        self.work: dist.Work | None = None
        self.sent = torch.zeros(0)  # kept while it is on its way

    def after_step(self, seconds: float) -> list[Slow]:
        """Note a step; on rank 0, return who is found to be slow."""
        now = self.phases.totals()
        if self.before is not None:
            data, compute, exposed = (
                one - other for one, other in zip(now, self.before, strict=True)
            )
            self.steps.append(Step(seconds, compute, data, exposed))
        self.before = now
        news = self._hear(wait=False)
        if len(self.steps) == EVERY:
            news += self._hear(wait=True)
            self._tell()
        return news

    def finish(self) -> None:
        """Let the last message arrive: nobody leaves a group that is still at work."""
        self._hear(wait=True)

    def _tell(self) -> None:
        sent, resent = segments()
        own = [value for step in self.steps for value in vars(step).values()]
        own += [sent - self.segments[0], resent - self.segments[1], self.writes, self.write_seconds]
        self.segments, self.steps = (sent, resent), []
        self.sent = torch.tensor(own, dtype=torch.float64)
        if self.ranks.rank == 0:
            self.inbox = [torch.empty_like(self.sent) for _ in range(self.ranks.world)]
        self.work = dist.gather(self.sent, self.inbox, 0, self.group, async_op=True)

    def _hear(self, *, wait: bool) -> list[Slow]:
        if self.work is None or not (wait or self.work.is_completed()):
            return []
        self.work.wait()
        self.work = None
        if self.inbox is None:
            return []
        news = self.detector.hear([part_of(message.tolist()) for message in self.inbox])
        for slow in news:
            report(self.ranks, slow)
        return news

    def wrote(self, seconds: float) -> None:
        """Note that this rank wrote its part of a checkpoint."""
        self.writes, self.write_seconds = self.writes + 1, seconds


def part_of(numbers: list[float]) -> Part:
    steps = (
        Step(*numbers[start : start + PER_STEP])
        for start in range(0, len(numbers) - BESIDE, PER_STEP)
    )
    return Part(tuple(steps), *numbers[-BESIDE:])


def segments() -> tuple[float, float]:
    """Return how many TCP segments this node has sent, and how many of them again."""
    with contextlib.suppress(OSError, ValueError):
        names, values = (
            line.split()[1:]
            for line in SNMP.read_text(encoding="ascii").splitlines()
            if line.startswith("Tcp:")
        )
        counts = dict(zip(names, map(float, values), strict=True))
        return counts.get("OutSegs", 0.0), counts.get("RetransSegs", 0.0)
    return 0.0, 0.0


def in_words(ranks: Ranks, slow: Slow) -> str:
    node, host = ranks.nodes[slow.rank]
    who = f"node {node} ({host})"
    if slow.cause != stragglers.LINK:
        who = f"rank {slow.rank} on {who}"
    when = f"steps {slow.first} to {slow.last}" if slow.first < slow.last else f"step {slow.last}"
    return f"{slow.cause}: {who} {slow.text} ({when})"


def report(ranks: Ranks, slow: Slow) -> None:
    """Tell this node's supervisor, where there is one; it tells the head."""
    run = os.environ.get("ORCHESTRATOR_RUN")
    if not run:
        return
    line = {
        "event": "slow",
        "rank": ranks.rank,
        "local": ranks.local,
        "time": time.time(),
        "cause": slow.cause,
        "who": slow.rank,
        "node": ranks.nodes[slow.rank][0],
        "step": slow.last,
        "text": in_words(ranks, slow)[:400],
    }
    with contextlib.suppress(OSError):  # the supervisor is gone
        pipe = os.open(Path(run, "reports"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, json.dumps(line).encode("ascii") + b"\n")
        finally:
            os.close(pipe)
