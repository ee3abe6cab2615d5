"""How far a job is, from the last lines of its metrics and from its config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import UsageError
from orchestrator.config import resolved
from orchestrator.records import trainers
from orchestrator.records.experiment import JobRecord
from orchestrator.records.last_metrics import last_values, loss_is_lost, number, step_of
from orchestrator.views.top.ranks import RankSample, ranks


@dataclass(frozen=True)
class Progress:
    """Each is None, or empty, where the metrics do not tell it."""

    step: int | None = None
    steps: int | None = None  # in all
    loss: float | None = None
    lost: bool = False  # the loss is NaN or infinite
    rate: float | None = None  # tokens, targets or samples per second
    left: float | None = None  # seconds
    slowest: str = ""  # the rank that keeps the others waiting
    trainer: int = 1  # whose step it is: the newest that is at work


def all_steps(experiment: Path, record: JobRecord) -> int | None:
    """Return how many steps the built-in training was told to do; only a program knows its own."""
    if not record.engine:
        return None
    try:
        steps = resolved.read(experiment)["training"]["max_steps"]
    except (UsageError, KeyError, TypeError):
        return None
    return steps if type(steps) is int else None


def of(
    experiment: Path, record: JobRecord, steps: int | None
) -> tuple[Progress, Sequence[RankSample]]:
    """Return how far a job is, and each of its ranks, as far as the metrics tell it."""
    trainer, files = trainers.newest(experiment / "outputs")
    each = ranks(record, files)
    line = last_values(files[min(files)] if files else None)
    told = number(line, "steps")  # of a program that prints it
    steps = int(told) if told else steps if trainer == 1 else None  # the config's: of the first
    step, step_ms = step_of(line), number(line, "step_ms")
    left = number(line, "left_s")  # as its ranks reckon
    if left is None and step is not None and step_ms is not None and steps is not None:
        left = max(0.0, steps - step) * step_ms / 1e3
    how_far = Progress(
        step=step,
        steps=None if step is None else steps,
        loss=number(line, "loss"),
        lost=loss_is_lost(line),
        rate=number(line, "tokens_per_s"),
        left=left,
        slowest=slowest(each),
        trainer=trainer,
    )
    return how_far, each


def slowest(each: Sequence[RankSample]) -> str:
    """Name the rank that computes or waits for data much longer than the median rank."""
    worst = max(each, key=lambda sample: sample.behind, default=None)
    return f"rank {worst.rank} +{worst.behind:.0%}" if worst is not None and worst.slow else ""
