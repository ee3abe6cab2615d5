"""Keep the best of a training by one of its metrics, and end it when nothing better comes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.common.errors import UsageError
from orchestrator.config.schema import best_metric
from orchestrator.engine.core.stopping import TrainState


@dataclass(frozen=True)
class Goal:
    """A metric, and whether its lowest or its highest value is the best."""

    name: str
    lowest: bool

    def better(self, value: float, than: float | None) -> bool:
        if math.isnan(value):
            return False
        return than is None or (value < than if self.lowest else value > than)


class Best:
    """Compare each evaluation, or each epoch, with the best one before it."""

    def __init__(self, wanted: str | None, patience: int | None, state: TrainState) -> None:
        self.goal = Goal(*best_metric("best", wanted)) if wanted else None
        self.patience, self.state = patience, state
        self.improved = False  # by what was heard last
        if patience and self.goal is None:
            raise UsageError(
                "patience= counts how often no better value came, but no metric is named",
                'best="min val_loss" or best="max val_accuracy" (checkpoint.best) names it',
            )

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Say at the first step, and not after the first epoch, that nothing has this name."""
        known = sorted(names)
        if self.goal is not None and self.goal.name not in known:
            raise UsageError(
                f"best: {self.goal.name!r} is not among the metrics of this training",
                f"it has {', '.join(known) or 'none'}; eval_* and val_* need held-out data",
            )

    def hear(self, values: Mapping[str, float]) -> None:
        """Take the values of an evaluation or an epoch; they are the same on all ranks."""
        self.improved = False
        if self.goal is None or self.goal.name not in values:
            return
        value, state = values[self.goal.name], self.state
        self.improved = self.goal.better(value, state.best)
        state.since_best += 1
        if self.improved:
            state.best, state.best_step, state.since_best = value, state.step, 0

    def reason_to_end(self) -> str:
        """Say why the training has to end; nothing, if it has not."""
        if self.goal is None or not self.patience or self.state.since_best < self.patience:
            return ""
        return f"no better {self.goal.name} came in {self.state.since_best} evaluations"
