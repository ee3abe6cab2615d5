"""Compares runs of different sizes: what each node still gives as more of them take part. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.common.errors import UsageError
from orchestrator.records.metrics import curves
from orchestrator.records.metrics.curves import Curve
from orchestrator.views.report.charts import NAMES, PARTS, Chart, Line
from orchestrator.views.report.story import Story

SHARES = (*PARTS, "exposed_comm_ms")
NOTABLE = 0.01  # of a step


@dataclass(frozen=True)
class Size:
    """One run: how large it was, and the median of what its steps took."""

    name: str
    nodes: int
    ranks: int
    speed: float  # per second, of all ranks
    unit: str
    step_ms: float
    parts: dict[str, float]  # ms of a step


@dataclass(frozen=True)
class Against:
    """A run beside the smallest one."""

    size: Size
    efficiency: float  # of a rank's speed in the smallest run
    lost_ms: float  # of a step, on every node
    idle_nodes: float  # as if so many nodes did nothing
    longer: list[tuple[str, float]]  # the parts of a step that take longer, and by how many ms


def sizes(stories: Sequence[Story]) -> list[Size]:
    """Return the runs by their size; those that cannot be compared are refused by name."""
    found = sorted((size_of(story) for story in stories), key=lambda size: size.ranks)
    if len({size.ranks for size in found}) < 2:
        raise UsageError(
            f"--scaling compares runs of different sizes; all of these have {found[0].ranks} ranks",
            "name runs with different numbers of nodes, or leave --scaling out",
        )
    if len(units := {size.unit for size in found}) > 1:
        raise UsageError(
            f"--scaling compares speeds; these runs count {' and '.join(sorted(units))}",
            "name runs of the same program",
        )
    return found


def size_of(story: Story) -> Size:
    name, nodes = story.experiment.name, story.record.nodes
    training = story.trainings[-1] if story.trainings else None
    known = training.curves if training else {}
    speed = curves.median(known.get("tokens_per_s", Curve()).means)
    if training is None or not speed:
        raise UsageError(
            f"{name} has no metrics of its speed, which --scaling compares",
            "leave it out; orchestrator's Trainer and engine write them, and programs that print"
            " tokens per second",
        )
    parts = {part: curves.median(known[part].means) for part in SHARES if part in known}
    step = curves.median(known.get("step_ms", Curve()).means)
    ranks = sum(node.nproc for node in nodes)
    return Size(name, len(nodes), ranks, speed, training.unit, step, parts)


def against_smallest(found: Sequence[Size]) -> Iterator[Against]:
    least = found[0]
    for size in found:
        efficiency = (size.speed / size.ranks) / (least.speed / least.ranks)
        lost = 1 - efficiency
        longer = [
            (NAMES[name], more)
            for name, value in size.parts.items()
            if name in least.parts and (more := value - least.parts[name]) > NOTABLE * size.step_ms
        ]
        yield Against(
            size,
            efficiency,
            max(0.0, lost) * size.step_ms,
            max(0.0, lost) * size.nodes,
            sorted(longer, key=lambda pair: -pair[1]),
        )


def chart(found: Sequence[Size]) -> Chart:
    """Draw the speed of each size, and what it would be if no time were lost."""
    by_ranks = {size.ranks: size.speed for size in found}  # of equal sizes, the last one
    ranks = sorted(by_ranks)
    least = found[0]
    ideal = [least.speed / least.ranks * count for count in ranks]
    lines = [
        Line("measured", Curve(ranks, [by_ranks[count] for count in ranks]), best="most"),
        Line("if nothing were lost", Curve(ranks, ideal), 7, 1),
    ]
    return Chart(f"Speed over ranks: {least.unit}", "/s", lines, over="ranks")
