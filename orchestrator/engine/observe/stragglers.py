"""Decide which rank holds the others up, and by what, from what each rank measured of itself.

The steps are grouped into windows of WINDOW_SECONDS at least, and the last WINDOWS are judged: so a
verdict stands on fifteen steps of half a second, and on six seconds of steps that are quick. What a
rank waits for others is never counted, so only the one that is waited for is slow. Nor is what its
machine did not give it: where other programs take the cores, no rank is slow for that.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.config.schema import Config
from orchestrator.engine.observe.cores import Denied
from orchestrator.engine.observe.phases import Phases
from orchestrator.engine.ranks import supervisor
from orchestrator.engine.ranks.ranks import Ranks, new_group
from orchestrator.records.metrics.slow_ranks import (
    COMPUTE,
    DATA,
    DISK,
    LINK,
    PART,
    excess,
    is_steady,
    of_others,
)

WINDOW_SECONDS = 0.4
WINDOWS = 15
STEADY_WINDOWS = 14  # slow compute shows in nearly every window, a busy machine in some
STALLED_WINDOWS = 5  # a loader may stall now and then
LOSSY_WINDOWS = 3  # lost packets come in bursts, too, where nothing is broken
SLOWER = 1.2  # the least factor on the others' time to compute
SPREADS = 2.5  # deviations of the others among themselves that a rank has to exceed, too
RESENT, RESENT_SEGMENTS = 0.02, 50  # a healthy link sends less than 0.1% again
WAITING = 0.2  # the part of the steps' time in communication: a lossy link may hold nobody up
LEAST_GIVEN = 0.05  # of the time to compute: what is denied may lie in other parts of a step
SLOW_WRITES, WRITE_FACTOR, WRITE_EXCESS_SECONDS = 2, 3.0, 1.0  # of checkpoints in a row


class Step(NamedTuple):
    """Hold the seconds of one rank's step; `compute` is NaN where waits are unseen."""

    whole: float
    compute: float
    data: float
    communication: float


@dataclass(frozen=True)
class Part:
    """Hold what one rank tells at once: some steps, and what else happened during them."""

    steps: tuple[Step, ...]
    sent: float = 0.0  # TCP segments of its node
    resent: float = 0.0
    writes: float = 0.0  # checkpoints that it wrote its part of, so far
    write_seconds: float = 0.0  # of the last one
    denied: float = 0.0  # seconds in which it wanted a core and had none


@dataclass(frozen=True)
class Slow:
    """A rank that holds the others up; `node` in its place where it is the node's link."""

    cause: str
    rank: int
    text: str  # in words, after the name of who it is
    first: int  # the steps that were looked at
    last: int


@dataclass(frozen=True)
class Window:
    """Some steps of every rank, added up: one Step per rank."""

    first: int
    last: int
    seconds: float  # of the rank that took longest
    ranks: tuple[Step, ...]
    sent: tuple[float, ...]
    resent: tuple[float, ...]
    denied: tuple[float, ...]

    def times(self, rank: int) -> tuple[float, float]:
        """Return a rank's time to compute in comparison with the others': whole, and without what
        each one's machine has denied it."""
        whole = [step.compute for step in self.ranks]
        given = [max(c - d, LEAST_GIVEN * c) for c, d in zip(whole, self.denied, strict=True)]
        usual = ((values[rank], of_others(values, rank)) for values in (whole, given))
        one, other = (value / others if others > 0 else math.nan for value, others in usual)
        return one, other


def slow_from(rank: int, ratios: Sequence[Sequence[float]]) -> float:
    """Return the ratio from which on a rank is slow.

    Where the others' times vary a lot, as on a busy machine, it has to stand out from that.
    """
    apart = []
    for other, values in enumerate(ratios):
        if other != rank:
            middle = statistics.median(values)
            apart += [abs(math.log(max(value, 1e-6) / max(middle, 1e-6))) for value in values]
    return max(SLOWER, math.exp(SPREADS * 1.4826 * statistics.median(apart)))


class Detector:
    """Hears the parts of all ranks, one after the other; tells each rank and cause once."""

    def __init__(self, step: int, nodes: Sequence[int]) -> None:
        self.step, self.nodes = step, nodes  # the node of each rank
        self.windows: deque[Window] = deque(maxlen=WINDOWS)
        self.open: list[tuple[int, list[Step]]] = []  # steps of a look that is not long enough
        self.sent = [0.0] * len(nodes)
        self.resent = [0.0] * len(nodes)
        self.denied = [0.0] * len(nodes)
        self.writes: dict[int, float] = {}  # rank -> the writes that were heard of
        self.slow_writes: dict[int, int] = {}  # rank -> slow ones in a row
        self.reported: set[tuple[str, int]] = set()

    def hear(self, parts: Sequence[Part]) -> list[Slow]:
        """Take what every rank tells of the same steps; return what is news."""
        found = self._disk(parts)
        for index in range(len(parts[0].steps)):
            self.step += 1
            self.open.append((self.step, [part.steps[index] for part in parts]))
            for rank, part in enumerate(parts):
                self.denied[rank] += part.denied / len(part.steps)
            if index + 1 == len(parts[0].steps):
                for rank, part in enumerate(parts):
                    self.sent[rank] += part.sent
                    self.resent[rank] += part.resent
            self._close()
        if len(self.windows) == WINDOWS:
            found += [*self._compute(), *self._data(), *self._link()]
        news = [slow for slow in found if (slow.cause, self._who(slow)) not in self.reported]
        self.reported |= {(slow.cause, self._who(slow)) for slow in news}
        return news

    def _who(self, slow: Slow) -> int:
        return self.nodes[slow.rank] if slow.cause == LINK else slow.rank

    def _close(self) -> None:
        """Make a look of the open steps once they are long enough."""
        seconds = sum(max(step.whole for step in steps) for _, steps in self.open)
        if seconds < WINDOW_SECONDS:
            return
        ranks = zip(*(steps for _, steps in self.open), strict=True)
        summed = tuple(Step(*map(sum, zip(*steps, strict=True))) for steps in ranks)
        first, last = self.open[0][0], self.open[-1][0]
        counts = (tuple(each) for each in (self.sent, self.resent, self.denied))
        self.windows.append(Window(first, last, seconds, summed, *counts))
        self.open = []
        self.sent, self.resent, self.denied = ([0.0] * len(self.nodes) for _ in range(3))

    def _slow(self, cause: str, rank: int, text: str) -> Slow:
        return Slow(cause, rank, text, self.windows[0].first, self.windows[-1].last)

    @property
    def _seconds(self) -> float:
        return sum(window.seconds for window in self.windows)

    def _compute(self) -> list[Slow]:
        ratios = [self._ratios(rank) for rank in range(len(self.nodes))]
        if any(math.isnan(sum(ratios_of_rank)) for ratios_of_rank in ratios):
            return []
        found = []
        for rank, ratios_of_rank in enumerate(ratios):
            steady = is_steady(ratios_of_rank, slow_from(rank, ratios), STEADY_WINDOWS)
            if steady and sum(self._lost("compute", rank)) >= PART * self._seconds:
                times = statistics.median(ratios_of_rank)
                found.append(
                    self._slow(COMPUTE, rank, f"computes {times:.2f} times as long as the others")
                )
        return found

    def _ratios(self, rank: int) -> list[float]:
        """Compare a rank's time to compute with the others', window by window."""
        return [min(window.times(rank)) for window in self.windows]

    def _lost(self, what: str, rank: int) -> list[float]:
        """Return by how much a rank took longer than the others, window by window."""
        return [excess([getattr(s, what) for s in window.ranks], rank) for window in self.windows]

    def _data(self) -> list[Slow]:
        found = []
        for rank in range(len(self.nodes)):
            denied = (max(0.0, excess(window.denied, rank)) for window in self.windows)
            lost = [a - b for a, b in zip(self._lost("data", rank), denied, strict=True)]
            parts = [one / window.seconds for one, window in zip(lost, self.windows, strict=True)]
            part = sum(lost) / self._seconds
            if part >= PART and is_steady(parts, PART, STALLED_WINDOWS):
                text = f"waits for its data {part:.0%} of the time longer than the others"
                found.append(self._slow(DATA, rank, text))
        return found

    def _link(self) -> list[Slow]:
        waited = sum(
            statistics.median(step.communication for step in window.ranks)
            for window in self.windows
        )
        if not waited >= WAITING * self._seconds:
            return []
        found = []
        for node in sorted(set(self.nodes)):
            rank = list(self.nodes).index(node)  # all ranks of a node see the same counters
            sent = sum(window.sent[rank] for window in self.windows)
            resent = sum(window.resent[rank] for window in self.windows)
            lossy = sum(window.resent[rank] > RESENT * window.sent[rank] for window in self.windows)
            if lossy >= LOSSY_WINDOWS and resent >= max(RESENT_SEGMENTS, RESENT * sent):
                text = (
                    f"sends {resent / max(1.0, sent):.1%} of its packets again, and communication"
                    f" takes {waited / self._seconds:.0%} of the time"
                )
                found.append(self._slow(LINK, rank, text))
        return found

    def _disk(self, parts: Sequence[Part]) -> list[Slow]:
        """Compare the times of a checkpoint, once every rank has written its part of it."""
        writes = {part.writes for part in parts}
        if len(writes) > 1 or writes == set(self.writes.values()) or writes == {0.0}:
            return []
        self.writes = {rank: part.writes for rank, part in enumerate(parts)}
        seconds = [part.write_seconds for part in parts]
        found = []
        for rank, taken in enumerate(seconds):
            usual = of_others(seconds, rank)
            far = taken >= WRITE_FACTOR * usual and taken - usual >= WRITE_EXCESS_SECONDS
            in_a_row = self.slow_writes[rank] = self.slow_writes.get(rank, 0) + 1 if far else 0
            if in_a_row >= SLOW_WRITES:
                text = (
                    f"wrote its part of a checkpoint in {taken:.1f} s, the others in {usual:.1f} s"
                )
                found.append(Slow(DISK, rank, text, self.step, self.step))
        return found


# -- what the ranks send each other ----------------------------------------------------------------


STEPS_AT_ONCE = 4  # steps that are told at once
PER_STEP, PER_MESSAGE = 4, 5  # numbers in a message
SNMP = Path("/proc/self/net/snmp")  # of this network namespace


class Watch:
    """One per training of several ranks. Every rank calls after_step() after the same steps."""

    def __init__(self, config: Config, ranks: Ranks, phases: Phases, step: int) -> None:
        self.ranks, self.phases = ranks, phases
        self.group = new_group("stragglers", dist.group.WORLD, config.distributed.timeout)
        self.detector = Detector(step + 1, [node for node, _ in ranks.nodes])
        self.steps: list[Step] = []
        self.before: tuple[float, float, float] | None = None  # no times of the first step
        self.segments = segments()
        self.writes = self.write_seconds = 0.0  # of checkpoints, told by whoever writes them
        self.denied, self.on_processor = Denied(), ranks.device.type == "cpu"
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
        if len(self.steps) == STEPS_AT_ONCE:
            news += self._hear(wait=True)
            self._report()
        return news

    def finish(self) -> None:
        """Let the last message arrive: nobody leaves a group that is still at work."""
        self._hear(wait=True)

    def _report(self) -> None:
        sent, resent = segments()
        numbers = [value for step in self.steps for value in step]
        numbers += [
            sent - self.segments[0],
            resent - self.segments[1],
            self.writes,
            self.write_seconds,
            # A device computes on while its program waits for a core.
            self.denied.seconds() if self.on_processor else 0.0,
        ]
        self.segments, self.steps = (sent, resent), []
        self.sent = torch.tensor(numbers, dtype=torch.float64)
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
            words = in_words(self.ranks, slow)
            supervisor.tell(self.ranks, slow.cause, slow.rank, slow.last, words)
        return news

    def wrote(self, seconds: float) -> None:
        """Note that this rank wrote its part of a checkpoint."""
        self.writes, self.write_seconds = self.writes + 1, seconds


def part_of(numbers: list[float]) -> Part:
    steps = (
        Step(*numbers[start : start + PER_STEP])
        for start in range(0, len(numbers) - PER_MESSAGE, PER_STEP)
    )
    return Part(tuple(steps), *numbers[-PER_MESSAGE:])


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
    if slow.cause != LINK:
        who = f"rank {slow.rank} on {who}"
    when = f"steps {slow.first} to {slow.last}" if slow.first < slow.last else f"step {slow.last}"
    return f"{slow.cause}: {who} {slow.text} ({when})"
