"""How far a job is, and each of its ranks: from the last lines of their metrics, and its config."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.common.errors import UsageError
from orchestrator.common.text import duration, size
from orchestrator.config import resolved
from orchestrator.records.experiment import JobRecord
from orchestrator.records.metrics import trainers
from orchestrator.records.metrics.trainers import Files, Point

NOTABLE = 0.1  # of a step: less is noise


@dataclass(frozen=True)
class Progress:
    """Each is None, or empty, where the metrics do not tell it."""

    step: int | None = None
    steps: int | None = None  # in all
    loss: float | None = None
    lost: bool = False  # the loss is NaN or infinite
    rate: float | None = None  # per second, of what `unit` names
    unit: str = trainers.TOKENS
    left: float | None = None  # seconds, from one on
    slowest: str = ""  # the rank that keeps the others waiting
    trainer: int = 1  # whose step it is: the newest


def parts(progress: Progress) -> list[str]:
    """Say how far a job is, in some texts: its step, its loss, its speed, the time that is left."""
    if progress.step is None:
        return []
    words = [f"step {progress.step}" + (f"/{progress.steps}" if progress.steps else "")]
    if progress.trainer > 1:
        words[0] += f" (Trainer {progress.trainer})"
    if progress.lost or progress.loss is not None:
        words.append("loss NaN" if progress.lost else f"loss {progress.loss:.4g}")
    if progress.rate is not None:
        words.append(f"{size(progress.rate).removesuffix('B').strip()}/s")
    if progress.left is not None:
        words.append(f"{duration(round(progress.left))} left")
    return words


@dataclass(frozen=True)
class RankProgress:
    """One rank: what its node says of its process, and its last line of metrics."""

    rank: int
    node: str
    index: int  # the node's
    state: str
    step: int | None = None
    step_ms: float | None = None
    own_ms: float | None = None  # without waiting for the others
    memory: float | None = None
    behind: float = 0.0  # how much longer than the median rank it takes, in parts of a step
    cause: str = ""  # by what it holds the others up, where whoever watches the job has said so

    @property
    def slow(self) -> bool:
        """Tell whether it was named as one that holds the others up, and still takes longer."""
        return bool(self.cause) and (self.own_ms is None or self.behind > NOTABLE)

    @property
    def how_slow(self) -> str:
        return f" +{self.behind:.0%}" if self.behind > NOTABLE else ""


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
) -> tuple[Progress, Sequence[RankProgress]]:
    """Return how far a job is, and each of its ranks, as far as the metrics tell it."""
    trainer, paths = trainers.newest(experiment / "outputs")
    ranks = of_ranks(record, paths)
    point = trainers.last(paths[min(paths)] if paths else None)
    printed = point.number("steps")  # of a program that prints it
    steps = int(printed) if printed else steps if trainer == 1 else None  # the config's: the first
    step, step_ms = point.step, point.number("step_ms")
    left = point.number("left_s")  # as its ranks reckon
    if left is None and step is not None and step_ms is not None and steps is not None:
        left = max(0.0, steps - step) * step_ms / 1e3
    progress = Progress(
        step=step,
        steps=None if step is None else steps,
        loss=point.number("loss"),
        lost=point.loss_is_lost,
        rate=point.number("tokens_per_s"),
        unit=point.unit,
        left=None if left is None or left < 1.0 else left,  # nothing: it has only begun, or ends
        slowest=slowest(ranks),
        trainer=trainer,
    )
    return progress, ranks


def slowest(ranks: Sequence[RankProgress]) -> str:
    """Name the rank that holds the others up most, and by what part of a step."""
    slow = [rank for rank in ranks if rank.slow]
    worst = max(slow, key=lambda rank: rank.behind, default=None)
    return f"rank {worst.rank}{worst.how_slow}" if worst is not None else ""


def causes(record: JobRecord) -> dict[int, str]:
    """Return rank -> by what it holds the others up, as was found in the attempt that runs."""
    begin = record.attempts[-1].ended if record.attempts else 0.0
    slow = (each for each in record.slow if each.holds_up)
    return {each.rank: each.cause for each in slow if (each.time or 0.0) >= begin}


def of_ranks(record: JobRecord, paths: Files) -> list[RankProgress]:
    """Return all ranks, in their order, from the record and the last line in the file of each."""
    ranks, cause_of = [], causes(record)
    for node in record.nodes:
        for rank in range(node.first_rank, node.first_rank + node.nproc):
            state = node.ranks[rank].state if rank in node.ranks else node.state
            point = trainers.last(paths.get(rank))
            ranks.append(
                RankProgress(
                    rank,
                    node.name,
                    node.index,
                    state,
                    point.step,
                    point.number("step_ms"),
                    time_of(point),
                    point.number("memory_bytes"),
                    cause=cause_of.get(rank, ""),
                )
            )
    return compared(ranks)


def time_of(point: Point) -> float | None:
    parts = [point.number(name) for name in ("data_ms", "forward_backward_ms")]
    return sum(part or 0.0 for part in parts) if any(parts) else None


def compared(ranks: list[RankProgress]) -> list[RankProgress]:
    """Say of each rank how far it is behind the median one."""
    known = [rank.own_ms for rank in ranks if rank.own_ms is not None]
    whole = next((rank.step_ms for rank in ranks if rank.step_ms), None)
    if len(known) < 2 or not whole:
        return ranks
    middle = statistics.median_low(known)
    return [
        replace(rank, behind=(rank.own_ms - middle) / whole) if rank.own_ms is not None else rank
        for rank in ranks
    ]
