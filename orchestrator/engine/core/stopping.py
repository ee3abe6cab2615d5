"""Decide when a training saves, evaluates and ends, and hold its progress.

Steps and epochs are the same on all ranks. Clocks are not, so rank 0's clock decides. A request of
any rank takes effect on all ranks after the same step.
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
from orchestrator.common.errors import UsageError, did_you_mean
from orchestrator.config.schema import best_metric
from orchestrator.engine.ranks import ranks

# -- the vote --------------------------------------------------------------------------------------


# ENOUGH: Trainer.stop(), which min_period delays. KEEP: a state in memory. PROFILE: the number of
# steps to trace.
STOP, TIME, SAVE, EVALUATE, ENOUGH, KEEP, PROFILE = range(7)
# These requests hold for one step; the others hold until the training ends.
ONCE = (SAVE, EVALUATE, KEEP, PROFILE)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopVote:
    """Agree over all ranks on requests to stop, save, evaluate or profile.

    Each rank posts its requests; an all-reduce over the CPU group returns the highest of each kind.
    """

    def __init__(self) -> None:
        self.alone = dist.get_world_size() == 1
        self.group = ranks.host_group()
        self.requested: dict[int, int] = {}
        self.voted = [0] * 7
        # The asynchronous all-reduce needs its tensor until it is done.
        self.sent = torch.zeros(7)
        self.work: dist.Work | None = None

    def request(self, what: int, amount: int = 1) -> None:
        self.requested[what] = amount

    def post(self) -> None:
        """Start the all-reduce of this rank's requests; result() waits for it."""
        self.voted = [self.requested.get(what, 0) for what in range(7)]
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
        """Vote and wait for the result, between steps.

        Requests that only apply after a step (ONCE) stay pending for the next post().
        """
        kept = self._take_once()
        self.post()
        self.requested |= kept
        return self.result()

    def _take_once(self) -> dict[int, int]:
        return {what: self.requested.pop(what) for what in ONCE if what in self.requested}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Turn signals into a request to stop.

        SIGTERM is how a stop reaches each node, at a different moment on each. SIGINT is Ctrl-C.
        Slurm sends SIGUSR1 before the time limit, if --signal asks for it.
        """
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in SIGNALS if main}
        if before.get(signal.SIGUSR1, signal.SIG_DFL) is not signal.SIG_DFL:
            # The program has its own handler for it.
            del before[signal.SIGUSR1]
        # A launcher may send a signal twice. A second one ends only a process started by hand.
        by_hand = self.alone and "LOCAL_RANK" not in os.environ

        def stop(number: int, frame: FrameType | None) -> None:
            self.request(STOP)
            if by_hand:
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
    # Seconds count from the start of train(); steps and epochs from the very first start.
    amount: float
    unit: str

    def times(self, seconds: float, steps: int, epochs: int) -> int:
        """Return how many whole durations have passed."""
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
    if count := COUNTS.get(unit.lower().removesuffix("s")):
        return Duration(amount, count)
    known = ["seconds", "minutes", "hours", "days", "epochs", "steps"]
    raise UsageError(
        f"{name} is {period!r}: {unit!r} is not a unit{did_you_mean(unit.lower(), known)}"
    )


Metrics = dict[str, float]


@dataclass
class TrainState:
    """The progress of the training; `trainer.state`."""

    # The number of complete epochs.
    epoch: int = 0
    # The number of batches that this rank has seen in the current epoch.
    batch: int = 0
    # The samples (or batches) of the current epoch that all ranks together have seen.
    position: int = 0
    # The number of optimizer steps.
    step: int = 0
    # The tokens, samples or targets that the loss has counted so far.
    tokens: int = 0
    # The means over all ranks in the last epoch.
    train_metrics: Metrics = field(default_factory=dict)
    val_metrics: Metrics = field(default_factory=dict)
    # One entry per epoch.
    history: list[Metrics] = field(default_factory=list)
    # The sum and the count of each metric in the current epoch.
    epoch_sums: dict[str, list[float]] = field(default_factory=dict, repr=False)
    # The best value so far of the metric that best= names.
    best: float | None = None
    best_step: int = 0
    # The number of evaluations since the best one.
    since_best: int = 0
    # The reason why train() returned.
    ended: str = ""

    def add_to_history(self, line: Metrics) -> None:
        """Add an epoch; after a resume it replaces the entry of the partial epoch before it."""
        before = self.history[-2]["epoch"] if len(self.history) > 1 else 0
        if self.history and self.history[-1]["epoch"] == before:
            self.history.pop()
        self.history.append(line)


@dataclass(frozen=True)
class Limit:
    """The longest that a training may last, and the reason to report when that is reached."""

    most: Duration
    reason: str


@dataclass(frozen=True)
class TrainingRequest:
    """The arguments of one train() call that do not depend on its data."""

    epochs: int | None = None
    # The training lasts at least this long; only a signal or a limit ends it earlier.
    least: Duration | None = None
    limits: Sequence[Limit] = ()
    # The intervals between checkpoints, and between evaluations.
    saving: Sequence[Duration] = ()
    evaluating: Sequence[Duration] = ()
    # "min NAME" or "max NAME": the metric that decides which checkpoint is the best.
    best: str | None = None
    patience: int | None = None
    # The checkpoint directory as the user wrote it.
    directory: str | Path | None = None
    # The number of checkpoints to keep.
    keep: int = 3
    # "never", "auto", or the checkpoint to resume from.
    resume: str = "never"
    # True if the user set a directory, an interval or a metric for checkpoints.
    asks_to_save: bool = False
    saves: bool = False
    at_end: bool = False


class Cadence:
    """An interval in seconds, steps or epochs, and how many of them have passed."""

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
        self.metric: str | None
        self.metric, self.lowest = best_metric("best", wanted) if wanted else (None, False)
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
        """Record an evaluation's or epoch's values; return True if they are the best so far.

        The values are the same on all ranks.
        """
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
        # Rank 0's clock decides for all ranks.
        self.first = ranks.is_first()
        self.began = time.monotonic()
        self.enough = False
        self.enough_reason = BY_PROGRAM
        # A signal or a time limit ends the training, so little time is left.
        self.urgent = False
        # A checkpoint or an evaluation is due after this step.
        self.save = self.evaluate = False
        # A state in memory is due after this step, by rank 0's clock.
        self.keep = False
        # The number of steps to trace from here on.
        self.profile = 0

    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def max_steps(self) -> int | None:
        counts = [int(x.most.amount) for x in self.limits if x.most.unit == "steps"]
        return min(counts, default=None)

    def steps_left(self, samples: int | None, at_once: int) -> int | None:
        """Return how many steps are left by step and epoch limits, or None if unknown.

        An epoch has `samples`, and a step takes `at_once` of them over all ranks.
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
        """Return the seconds until the time limit, or None without one."""
        most = min((x.most.amount for x in self.limits if x.most.unit == "seconds"), default=None)
        return None if most is None else max(0.0, most - self.seconds())

    # -- calls of the loop ------------------------------------------------------------------------

    def nothing_to_do(self) -> bool:
        return self._agreed(self._done() or bool(self._over("steps", "epochs")))

    def before_first_step(self) -> None:
        """Apply requests of on_train_begin, and signals that arrived before the first step."""
        self._hear(self.vote.poll())
        self._end_if_enough()

    def after_step(self, *, epoch_over: bool) -> None:
        """Apply the vote of this step, then check limits and, on rank 0, the clock."""
        state, seconds = self.state, self.seconds()
        requested = self.vote.result()
        self._hear(requested)
        self.save = bool(requested[SAVE]) or self._due(self.saving, seconds, "steps", "epochs")
        self.evaluate = bool(requested[EVALUATE]) or self._due(self.evaluating, seconds, "steps")
        self.keep, self.profile = bool(requested[KEEP]), requested[PROFILE]
        # All ranks agree on whether a min_period is over that is not in seconds.
        by_count = self.least is None or self.least.unit != "seconds"
        if limit := self._over("steps"):
            state.ended = state.ended or limit.reason
        elif self.enough and not epoch_over and by_count and self._may_end():
            state.ended = state.ended or self.enough_reason
        if not self.first:
            return
        if self._over("seconds") or (self.enough and not epoch_over and self._may_end()):
            # The vote after the next step has it.
            self.vote.request(TIME)
        if self._due(self.saving, seconds, "seconds"):
            self.vote.request(SAVE)
        if self._due(self.evaluating, seconds, "seconds"):
            self.vote.request(EVALUATE)

    def after_epoch(self) -> None:
        """Apply requests of on_epoch_end, and signals during the validation."""
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
        """Request the end at the next vote, once min_period is over; any rank may call it."""
        if ENOUGH not in self.vote.requested:
            self.enough_reason = reason
        self.vote.request(ENOUGH)

    def compare(self, values: Metrics) -> None:
        """Request a save if the values are the best so far, or the end if patience is over."""
        self.save = self.best.improved(values) or self.save
        if reason := self.best.reason_to_end():
            self.request_end(reason)

    def stop_requested(self) -> bool:
        """Return True if any rank was asked to stop; called between batches of an evaluation."""
        stop = bool(self.vote.poll()[STOP])
        if stop:
            self.urgent, self.state.ended = True, self.state.ended or "asked to stop"
        return stop

    # -- decisions --------------------------------------------------------------------------------

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

    def _over(self, *units: str) -> Limit | None:
        state, seconds = self.state, self.seconds()
        over = (
            limit
            for limit in self.limits
            if limit.most.unit in units and limit.most.over(seconds, state.step, state.epoch)
        )
        return next(over, None)

    def _due(self, cadences: Sequence[Cadence], seconds: float, *units: str) -> bool:
        # Each cadence has to count, also after one that is due.
        answers = [each.due(seconds, self.state) for each in cadences if each.every.unit in units]
        return any(answers)

    def _agreed(self, answer: bool) -> bool:
        """Return rank 0's answer on every rank."""
        return ranks.gather_values(answer)[0]
