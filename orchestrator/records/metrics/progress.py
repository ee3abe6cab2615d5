"""The progress of a job and its ranks, from the last lines of their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.common.text import format_bytes, format_duration
from orchestrator.protocol.events import UNSAVED
from orchestrator.records.experiment import JobRecord
from orchestrator.records.metrics import trainers
from orchestrator.records.metrics.trainers import Files, Point

# Smaller shares of a step are noise.
NOTABLE = 0.1


@dataclass(frozen=True)
class Progress:
    """The progress of a job. Values that are not in the metrics are None or empty."""

    step: int | None = None
    # The number of steps in all.
    steps: int | None = None
    loss: float | None = None
    # True if the loss is NaN or infinite.
    lost: bool = False
    # Per second, in units of `unit`.
    rate: float | None = None
    unit: str = trainers.TOKENS
    # The seconds that are left, if at least one.
    left: float | None = None
    # The rank that keeps the others waiting, as text.
    slowest: str = ""


def progress_texts(progress: Progress) -> list[str]:
    """Return the known parts of a job's progress as text: step, loss, speed, time left."""
    if progress.step is None:
        return []
    words = [f"step {progress.step}" + (f"/{progress.steps}" if progress.steps else "")]
    if progress.lost or progress.loss is not None:
        words.append("loss NaN" if progress.lost else f"loss {progress.loss:.4g}")
    if progress.rate is not None:
        words.append(f"{format_bytes(progress.rate).removesuffix('B').strip()}/s")
    if progress.left is not None:
        words.append(f"{format_duration(round(progress.left))} left")
    return words


@dataclass(frozen=True)
class RankProgress:
    """The progress of one rank: the state of its process, and its last line of metrics."""

    rank: int
    node: str
    # The index of the node.
    index: int
    state: str
    step: int | None = None
    step_ms: float | None = None
    # The time of a step without waiting for other ranks.
    own_ms: float | None = None
    memory: float | None = None
    # How much more time it takes than the median rank, as a share of a step.
    behind: float = 0.0
    # What holds the others up, if that was reported for this rank.
    cause: str = ""

    @property
    def slow(self) -> bool:
        """Return True if it was reported as slow and still takes longer than others."""
        return bool(self.cause) and (self.own_ms is None or self.behind > NOTABLE)

    @property
    def how_slow(self) -> str:
        return f" +{self.behind:.0%}" if self.behind > NOTABLE else ""


def read_progress(experiment: Path, record: JobRecord) -> tuple[Progress, Sequence[RankProgress]]:
    """Return the progress of a job and of each of its ranks, from the metrics."""
    paths = trainers.newest_metrics_files(experiment / "outputs")
    ranks = of_ranks(record, paths)
    point = trainers.read_last_values(paths[min(paths)] if paths else None)
    left, steps = point.number("left_s"), point.number("steps")
    progress = Progress(
        step=point.step,
        steps=None if point.step is None or not steps else int(steps),
        loss=point.number("loss"),
        lost=point.loss_is_lost,
        rate=point.number("tokens_per_s"),
        unit=point.unit,
        # Less than a second is not shown: the job starts or ends then.
        left=None if left is None or left < 1.0 else left,
        slowest=slowest_rank(ranks),
    )
    return progress, ranks


def slowest_rank(ranks: Sequence[RankProgress]) -> str:
    """Return the rank that holds the others up most, with the share of a step, as text."""
    slow = [rank for rank in ranks if rank.slow]
    worst = max(slow, key=lambda rank: rank.behind, default=None)
    return f"rank {worst.rank}{worst.how_slow}" if worst is not None else ""


def slow_causes(record: JobRecord) -> dict[int, str]:
    """Return the reported causes of slow ranks in the present attempt, by rank."""
    begin = record.attempts[-1].ended if record.attempts else 0.0
    slow = (each for each in record.slow if each.cause != UNSAVED)
    return {each.rank: each.cause for each in slow if (each.time or 0.0) >= begin}


def of_ranks(record: JobRecord, paths: Files) -> list[RankProgress]:
    """Return the progress of all ranks in order, from the record and their last lines."""
    ranks, cause_of = [], slow_causes(record)
    for node in record.nodes:
        for rank in range(node.first_rank, node.first_rank + node.nproc):
            state = node.ranks[rank].state if rank in node.ranks else node.state
            point = trainers.read_last_values(paths.get(rank))
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
    return compare_ranks(ranks)


def time_of(point: Point) -> float | None:
    parts = [point.number(name) for name in ("data_ms", "forward_backward_ms")]
    return sum(part or 0.0 for part in parts) if any(parts) else None


def compare_ranks(ranks: list[RankProgress]) -> list[RankProgress]:
    """Return the ranks with `behind` set, relative to the median rank."""
    known = [rank.own_ms for rank in ranks if rank.own_ms is not None]
    whole = next((rank.step_ms for rank in ranks if rank.step_ms), None)
    if len(known) < 2 or not whole:
        return ranks
    middle = sorted(known)[(len(known) - 1) // 2]
    return [
        replace(rank, behind=(rank.own_ms - middle) / whole) if rank.own_ms is not None else rank
        for rank in ranks
    ]
