"""The learning rate: a scheduler of torch's with its state, and the schedules of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from orchestrator.common.errors import UsageError
from orchestrator.config.schema import Scheduler
from orchestrator.engine.core.optimizer import is_plain
from orchestrator.engine.core.stopping import Metrics


class LrScheduler:
    """A scheduler of torch's, if there is one, and when it steps."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer, every: str) -> None:
        if isinstance(scheduler, type) or (scheduler and not hasattr(scheduler, "step")):
            scheduler = scheduler(optimizer)
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise UsageError("the scheduler belongs to another optimizer than the Trainer's")
        self.scheduler, self.every = scheduler, every
        self.by_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if self.by_metric and every == "step":
            raise UsageError(
                "ReduceLROnPlateau looks at the loss of an epoch",
                'say scheduler_every="epoch"',
            )
        if self.by_metric and scheduler.mode == "max":
            raise UsageError(
                'ReduceLROnPlateau(mode="max") would wait for a loss that grows: a Trainer shows it'
                " the loss of each epoch",
                "leave out mode=, or step it in on_epoch_end=:"
                ' plateau.step(trainer.state.val_metrics["accuracy"])',
            )
        self.given = self.state()

    def after_step(self) -> None:
        if self.scheduler is not None and self.every == "step":
            self._step()

    def after_epoch(self, metrics: Metrics) -> None:
        if self.scheduler is not None and self.every == "epoch":
            self._step(*([metrics["loss"]] if self.by_metric else []))

    def _step(self, *loss: float) -> None:
        try:
            self.scheduler.step(*loss)
        except ValueError:
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler.last_epoch <= total:
                raise
            raise UsageError(
                f"{type(self.scheduler).__name__} is over after its {total} steps",
                "make it with the steps of the whole training; one that is resumed goes on as it"
                " was saved, so that a longer training begins anew with its weights (weights=)",
            ) from None

    def state(self) -> dict[str, Any] | None:
        """Give what JSON keeps: a checkpoint's progress is written so."""
        if self.scheduler is None:
            return None
        return {k: v for k, v in self._whole_state().items() if is_plain(v)}

    def _whole_state(self) -> dict[str, Any]:
        """Give what torch's schedulers give, also for a user's own that has no more than step()."""
        if hasattr(self.scheduler, "state_dict"):
            return dict(self.scheduler.state_dict())
        return {k: v for k, v in vars(self.scheduler).items() if k != "optimizer"}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Take the rest (functions, counters) from the scheduler as it was made again."""
        if self.scheduler is None or state is None:
            return
        whole = {**self._whole_state(), **state}
        if hasattr(self.scheduler, "load_state_dict"):
            self.scheduler.load_state_dict(whole)
        else:
            vars(self.scheduler).update(whole)


def schedule(config: Scheduler, step: int, max_steps: int) -> float:
    """Give steps 1, 2, ... their part of the highest learning rate; a resume needs no state."""
    total = config.total_steps or max_steps
    warmup = max(1, total // 20) if config.warmup_steps is None else config.warmup_steps
    if step <= warmup:
        return step / warmup
    if config.name == "constant":
        return 1.0
    start = warmup
    if config.name == "wsd":
        start = max(warmup, total - (config.decay_steps or max(1, total // 5)))
    done = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    low = config.min_lr_ratio
    if config.name == "cosine":
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
    return 1.0 - (1 - low) * done
