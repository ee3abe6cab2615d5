"""Decide when a training saves, evaluates and ends, and keep where it is.

Steps and epochs are the same on all ranks; clocks are not, so rank 0's counts, and what any rank
requests is done by all after the same step.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from orchestrator.common import text
from orchestrator.common.errors import UsageError, nearest
from orchestrator.config.schema import best_metric
from orchestrator.engine.ranks import ranks

# -- the vote --------------------------------------------------------------------------------------


# ENOUGH: Trainer.stop(), which min_period delays. PROFILE: so many steps are to be traced.
STOP, TIME, SAVE, EVALUATE, ENOUGH, PROFILE = range(6)
ONCE = (SAVE, EVALUATE, PROFILE)  # done and forgotten; the others hold until the training ends
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopVote:
    """Signals and clocks end a training through this."""

    def __init__(self) -> None:
        self.alone = dist.get_world_size() == 1
        self.group = ranks.host_group()
        self.requested: dict[int, int] = {}
        self.voted = [0] * 6
        self.sent = torch.zeros(6)  # kept while it is on its way
        self.work: dist.Work | None = None

    def request(self, what: int, amount: int = 1) -> None:
        self.requested[what] = amount

    def requests(self, what: int) -> bool:
        """Return whether this rank requests it already."""
        return what in self.requested

    def post(self) -> None:
        """Send this rank's requests; result() has the answer."""
        self.voted = [self.requested.get(what, 0) for what in range(6)]
        self._take_once()
        if not self.alone:
            self.sent = torch.tensor(self.voted)
            self.work = dist.all_reduce(
                self.sent, dist.ReduceOp.MAX, group=self.group, async_op=True
            )

    def result(self) -> list[int]:
        """Return the votes by STOP, TIME, ...: the highest of all ranks, the same on all."""
        if self.work is not None:
            self.work.wait()
            self.work, self.voted = None, self.sent.tolist()
        return self.voted

    def poll(self) -> list[int]:
        """Vote at once, between steps; what is done after a step waits for the next one."""
        kept = self._take_once()
        self.post()
        self.requested |= kept
        return self.result()

    def _take_once(self) -> dict[int, int]:
        return {what: self.requested.pop(what) for what in ONCE if what in self.requested}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Turn signals into a request to stop. SIGTERM is how a stop arrives, on every node at its
        own moment; SIGINT is Ctrl-C; SIGUSR1 is sent by Slurm, if told to, before time is over."""
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in SIGNALS if main}
        if before.get(signal.SIGUSR1, signal.SIG_DFL) is not signal.SIG_DFL:
            del before[signal.SIGUSR1]  # the user's own
        by_hand = self.alone and "LOCAL_RANK" not in os.environ  # a launcher may signal twice

        def stop(number: int, frame: FrameType | None) -> None:
            self.request(STOP)
            if by_hand:  # a second one ends it at once
                signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# -- durations -------------------------------------------------------------------------------------


COUNTS = {"e": "epochs", "epoch": "epochs", "st": "steps", "step": "steps"}


@dataclass(frozen=True)
class Duration:
    amount: float
    unit: str  # seconds (since train() began), steps or epochs (since the very beginning)

    def times(self, seconds: float, steps: int, epochs: int) -> int:
        """Return how often it has passed."""
        passed = {"seconds": seconds, "steps": steps, "epochs": epochs}[self.unit]
        return int(passed / self.amount)

    def over(self, seconds: float, steps: int, epochs: int) -> bool:
        return self.times(seconds, steps, epochs) >= 1

    def __str__(self) -> str:
        return f"{self.amount:g} {self.unit}"


def parse_period(name: str, period: str | None) -> Duration | None:
    if period is None:
        return None
    parts = text.number_and_unit(str(period))
    if parts is None or not parts[0] or not parts[1]:
        raise UsageError(
            f"{name} is {period!r}; it must be a number above 0 with a unit",
            'such as "30s", "2m", "1.5h", "1000 steps" or "3 epochs"',
        )
    amount, unit = parts
    if letter := text.time_unit(unit):
        return Duration(amount * text.SECONDS[letter], "seconds")
    plain = unit.lower().removesuffix("s")
    if count := COUNTS.get(unit.lower()) or COUNTS.get(plain):
        return Duration(amount, count)
    known = ["seconds", "minutes", "hours", "days", "epochs", "steps"]
    raise UsageError(f"{name} is {period!r}: {unit!r} is not a unit{nearest(unit.lower(), known)}")


Metrics = dict[str, float]


@dataclass
class TrainState:
    """The progress of the training; `trainer.state`."""

    epoch: int = 0  # complete ones
    batch: int = 0  # of this rank, in the epoch that has begun
    position: int = 0  # samples (or batches) of this epoch that all ranks together have seen
    step: int = 0  # of the optimizer
    tokens: int = 0  # counted by the loss so far: tokens, samples or targets
    train_metrics: Metrics = field(default_factory=dict)  # of the last epoch, over all ranks
    val_metrics: Metrics = field(default_factory=dict)
    history: list[Metrics] = field(default_factory=list)  # a line per epoch
    epoch_sums: dict[str, list[float]] = field(default_factory=dict, repr=False)  # sum and count
    best: float | None = None  # of the metric that best= names
    best_step: int = 0
    since_best: int = 0  # evaluations since then
    ended: str = ""  # why train() returned

    def add_to_history(self, line: Metrics) -> None:
        """Add an epoch; after a resume it takes the place of the part that was trained before."""
        before = self.history[-2]["epoch"] if len(self.history) > 1 else 0
        if self.history and self.history[-1]["epoch"] == before:
            self.history.pop()
        self.history.append(line)


@dataclass(frozen=True)
class Limit:
    """The most that a training may take, and what is said when it is over."""

    most: Duration
    reason: str


@dataclass(frozen=True)
class TrainingRequest:
    """All that a training is to do, as far as it is known before there are data."""

    epochs: int | None = None
    least: Duration | None = None  # that it lasts, whatever ends it
    limits: Sequence[Limit] = ()
    saving: Sequence[Duration] = ()  # how often
    evaluating: Sequence[Duration] = ()
    best: str | None = None  # metric
    patience: int | None = None
    directory: str | Path | None = None  # as the user has named it
    keep: int = 3  # checkpoints
    resume: str = "never"  # auto, or from what
    asks_to_save: bool = False  # by a place, a time or a metric
    saves: bool = False
    at_end: bool = False


class Cadence:
    """Every so many seconds, steps or epochs."""

    def __init__(self, every: Duration, state: TrainState) -> None:
        self.every = every
        self.passed = every.times(0.0, state.step, state.epoch)

    def due(self, seconds: float, state: TrainState) -> bool:
        passed = self.every.times(seconds, state.step, state.epoch)
        due, self.passed = passed > self.passed, max(passed, self.passed)
        return due


class Best:
    """Compare each evaluation, or each epoch, with the best one before it."""

    def __init__(self, wanted: str | None, patience: int | None, state: TrainState) -> None:
        self.metric: str | None = None
        self.lowest = False
        if wanted:
            self.metric, self.lowest = best_metric("best", wanted)
        self.patience, self.state = patience, state

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Refuse at the first step a metric that no evaluation will have."""
        known = sorted(names)
        if self.metric is not None and self.metric not in known:
            raise UsageError(
                f"best: {self.metric!r} is not among the metrics of this training",
                f"it has {', '.join(known) or 'none'}; eval_* and val_* need held-out data",
            )

    def improved(self, values: Mapping[str, float]) -> bool:
        """Note the values of an evaluation or an epoch, which are the same on all ranks."""
        if self.metric is None or self.metric not in values:
            return False
        value, state = values[self.metric], self.state
        if state.best is None:
            better = not math.isnan(value)
        else:
            better = value < state.best if self.lowest else value > state.best
        state.since_best += 1
        if better:
            state.best, state.best_step, state.since_best = value, state.step, 0
        return better

    def reason_to_end(self) -> str:
        """Return why the training has to end, or an empty text if it does not."""
        if self.metric is None or not self.patience or self.state.since_best < self.patience:
            return ""
        return f"no better {self.metric} came in {self.state.since_best} evaluations"


BY_PROGRAM = "ended by a hook that returned True, or by trainer.stop()"


class StopPolicy:
    """Decide with the other ranks, after each step and epoch, whether to save, evaluate or end."""

    def __init__(self, state: TrainState, asked: TrainingRequest) -> None:
        self.state, self.epochs, self.least = state, asked.epochs, asked.least
        self.best = Best(asked.best, asked.patience, state)
        self.limits = sorted(asked.limits, key=lambda limit: limit.most.amount)
        self.saving = [Cadence(every, state) for every in asked.saving]
        self.evaluating = [Cadence(every, state) for every in asked.evaluating]
        self.vote = StopVote()
        self.first = ranks.is_first()  # its clock is that of all
        self.began = time.monotonic()
        self.enough = False
        self.enough_reason = BY_PROGRAM
        # Ended by a signal or a clock, which may not wait for long.
        self.urgent = False
        self.save = self.evaluate = False  # due after this step
        self.profile = 0  # steps that are to be traced from here on

    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def max_steps(self) -> int | None:
        counts = [int(x.most.amount) for x in self.limits if x.most.unit == "steps"]
        return min(counts, default=None)

    def steps_left(self, samples: int | None, at_once: int) -> int | None:
        """Return how many steps are left by count, as far as that can be known.

        An epoch has so many samples, and a step takes so many at once, over all ranks.
        """
        state, most = self.state, self.max_steps
        counts = [] if most is None else [most - state.step]
        if samples:
            of_epoch, done = -(-samples // at_once), -(-state.position // at_once)
            epochs = [int(x.most.amount) for x in self.limits if x.most.unit == "epochs"]
            epochs += [] if self.epochs is None else [self.epochs]
            counts += [(count - state.epoch) * of_epoch - done for count in epochs]
        return max(0, min(counts)) if counts else None

    @property
    def seconds_left(self) -> float | None:
        """Return what its clock leaves to the training."""
        most = min((x.most.amount for x in self.limits if x.most.unit == "seconds"), default=None)
        return None if most is None else max(0.0, most - self.seconds())

    # -- asked by the loop ------------------------------------------------------------------------

    def nothing_to_do(self) -> bool:
        return self._agreed(self._done() or bool(self._over("steps", "epochs")))

    def before_first_step(self) -> None:
        """Hear what on_train_begin asked for, or a signal that came before it."""
        self._hear(self.vote.poll())
        self._end_if_enough()

    def after_step(self, *, epoch_over: bool) -> None:
        """Hear what the ranks voted during the step, and look at the clock."""
        state, seconds = self.state, self.seconds()
        requested = self.vote.result()
        self._hear(requested)
        save, evaluate = requested[SAVE], requested[EVALUATE]
        self.save = bool(save) or self._due(self.saving, seconds, "steps", "epochs")
        self.evaluate = bool(evaluate) or self._due(self.evaluating, seconds, "steps")
        self.profile = requested[PROFILE]
        if limit := self._over("steps"):
            state.ended = state.ended or limit.reason
        elif self.enough and not epoch_over and self._may_end_by_count():
            state.ended = state.ended or self.enough_reason
        if not self.first:
            return
        if self._over("seconds") or (self.enough and not epoch_over and self._may_end()):
            self.vote.request(TIME)  # heard with the next step
        if self._due(self.saving, seconds, "seconds"):
            self.vote.request(SAVE)
        if self._due(self.evaluating, seconds, "seconds"):
            self.vote.request(EVALUATE)

    def after_epoch(self) -> None:
        """Hear what on_epoch_end asked for, or a signal during the validation."""
        self._hear(self.vote.poll())
        state, limit = self.state, self._over("seconds", "steps", "epochs")
        if state.ended:
            return
        if self._agreed(self._done() or limit is not None):
            done = self.epochs is not None and state.epoch >= self.epochs
            reason = limit.reason if limit else "max_period is over"
            state.ended = f"{state.epoch} epochs are done" if done else reason
        else:
            self._end_if_enough()

    def request_end(self, reason: str = BY_PROGRAM) -> None:
        """End with the next vote, once min_period is over; any rank may ask for it."""
        if not self.vote.requests(ENOUGH):
            self.enough_reason = reason
        self.vote.request(ENOUGH)

    def compare(self, values: Metrics) -> None:
        """Save what is better than all before it, and end when nothing better comes."""
        self.save = self.best.improved(values) or self.save
        if reason := self.best.reason_to_end():
            self.request_end(reason)

    def stop_requested(self) -> bool:
        """Return True if a rank was asked to stop; asked between two batches of an evaluation."""
        stop = bool(self.vote.poll()[STOP])
        if stop:
            self.urgent, self.state.ended = True, self.state.ended or "asked to stop"
        return stop

    # -- how it decides ---------------------------------------------------------------------------

    def _hear(self, requested: list[int]) -> None:
        stop, out_of_time, enough = (bool(requested[what]) for what in (STOP, TIME, ENOUGH))
        self.enough = self.enough or enough
        if self.state.ended or not (stop or out_of_time):
            return
        self.urgent = stop or not self.enough
        clocks = [limit.reason for limit in self.limits if limit.most.unit == "seconds"]
        if stop or (not self.enough and not clocks):
            self.state.ended = "asked to stop"
        else:
            self.state.ended = self.enough_reason if self.enough else clocks[0]

    def _end_if_enough(self) -> None:
        if self.enough and not self.state.ended and self._agreed(self._may_end()):
            self.state.ended = self.enough_reason

    def _done(self) -> bool:
        return self.epochs is not None and self.state.epoch >= self.epochs and self._may_end()

    def _may_end(self) -> bool:
        state = self.state
        return self.least is None or self.least.over(self.seconds(), state.step, state.epoch)

    def _may_end_by_count(self) -> bool:
        """Return True if min_period is over by a count, which all ranks see alike."""
        return (self.least is None or self.least.unit != "seconds") and self._may_end()

    def _over(self, *units: str) -> Limit | None:
        state, seconds = self.state, self.seconds()
        over = (
            limit
            for limit in self.limits
            if limit.most.unit in units and limit.most.over(seconds, state.step, state.epoch)
        )
        return next(over, None)

    def _due(self, cadences: Sequence[Cadence], seconds: float, *units: str) -> bool:
        cadences_now = [cadence for cadence in cadences if cadence.every.unit in units]
        return any([cadence.due(seconds, self.state) for cadence in cadences_now])  # noqa: C419 (each has to count)

    def _agreed(self, answer: bool) -> bool:
        """Return rank 0's answer on every rank."""
        return ranks.gather(answer)[0]
