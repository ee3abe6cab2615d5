"""Where a Trainer's training is, and when it saves and ends. Called by trainer.py.

Steps and epochs are the same on all ranks; clocks are not, so rank 0's counts, and what anybody
asks for is done by all after the same step.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.engine.core import duration, stop_vote
from orchestrator.engine.observe.metrics import MetricsFile
from orchestrator.engine.ranks import ranks

if TYPE_CHECKING:
    from orchestrator.engine.trainer import Trainer

Metrics = dict[str, float]


@dataclass
class TrainState:
    """Where the training is; `trainer.state`."""

    epoch: int = 0  # complete ones
    batch: int = 0  # of this rank, in the epoch that has begun
    step: int = 0  # of the optimizer
    train_metrics: Metrics = field(default_factory=dict)  # of the last epoch, over all ranks
    val_metrics: Metrics = field(default_factory=dict)
    history: list[Metrics] = field(default_factory=list)  # a line per epoch
    ended: str = ""  # why train() returned


@dataclass(frozen=True)
class Limits:
    """When train() returns."""

    epochs: int | None
    least: duration.Period | None
    most: duration.Period | None
    began: float

    def of(self, text: duration.Period, state: TrainState) -> bool:
        return text.over(time.monotonic() - self.began, state.step, state.epoch)

    def may_end(self, state: TrainState) -> bool:
        return self.least is None or self.of(self.least, state)

    def has_to_end(self, state: TrainState) -> bool:
        return self.most is not None and self.of(self.most, state)


class Run:
    """What one call of train() decides, with the other ranks, after each step and epoch."""

    def __init__(
        self, trainer: Trainer, asked: stop_vote.Agreement, limits: Limits,
        saving: duration.Period | None, place: Path, keep: int,
    ) -> None:  # fmt: skip
        self.trainer, self.asked, self.limits, self.saving = trainer, asked, limits, saving
        self.checkpoints = trainer._saving(place, keep) if saving else None
        self.saved = saving.times(0.0, trainer.state.step, trainer.state.epoch) if saving else 0
        self.file = MetricsFile(trainer.ranks.rank, trainer.state.step)
        run, own = os.environ.get("ORCHESTRATOR_RUN"), os.environ.get("LOCAL_RANK", "0")
        self.sign = Path(run, f"step_{own}") if run else None
        self.first = trainer.ranks.rank == 0  # its clock is that of all
        self.enough = False

    def goes_on(self) -> None:
        """A sign for those who watch whether the job does."""
        if self.sign is not None:
            self.sign.touch()

    def after_step(self) -> None:
        self.goes_on()
        self._hear(self.asked.agreed())
        state, limits = self.trainer.state, self.limits
        if limits.most and limits.most.unit == "steps" and limits.has_to_end(state):
            state.ended = state.ended or "max_period is over"
        elif self.first and (limits.has_to_end(state) or (self.enough and limits.may_end(state))):
            self.asked.ask(stop_vote.TIME)  # heard with the next step
        if self.saving and self.saving.unit == "steps" and self._due():
            self._save()
        elif self.saving and self.saving.unit == "seconds" and self.first and self._due():
            self.asked.ask(stop_vote.SAVE)
        if self.checkpoints is not None:
            self.checkpoints.poll()

    def after_epoch(self) -> None:
        self.goes_on()
        self._hear(self.asked.agreed())
        self._hear(self.asked.now())  # what on_epoch_end asked for
        state = self.trainer.state
        if self.saving and self.saving.unit != "seconds" and self._due():
            self._save()
        if not state.ended and self.trainer._done(self.limits):
            epochs = self.limits.epochs
            done = epochs is not None and state.epoch >= epochs
            state.ended = f"{state.epoch} epochs are done" if done else "max_period is over"
        elif not state.ended and self.enough and ranks.gather(self.limits.may_end(state))[0]:
            state.ended = "asked to stop"

    def _hear(self, agreed: list[bool]) -> None:
        stop, out_of_time, save, _, enough = agreed
        self.enough = self.enough or enough
        if save:
            self._save()
        if stop or (out_of_time and self.enough):
            self.trainer.state.ended = "asked to stop"
        elif out_of_time:
            self.trainer.state.ended = "max_period is over"

    def _due(self) -> bool:
        state = self.trainer.state
        seconds = time.monotonic() - self.limits.began
        times = self.saving.times(seconds, state.step, state.epoch) if self.saving else 0
        if times <= self.saved:
            return False
        self.saved = times
        return True

    def _save(self) -> None:
        assert self.checkpoints is not None
        self.trainer._save(self.checkpoints)

    def end(self) -> None:
        if self.checkpoints is not None:
            if self.checkpoints.last_saved != self.trainer.state.step:
                self._save()
            self.checkpoints.wait()
