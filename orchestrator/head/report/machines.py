"""Reads what the nodes' machines did into curves over the time of the job: a row for each node."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator import files
from orchestrator.head.report.curves import Curve
from orchestrator.records import node_metrics
from orchestrator.records.added_lines import parsed
from orchestrator.records.experiment import JobRecord
from orchestrator.records.node_metrics import LONGEST, NodeSample

COLUMNS = 200
WHOLE = 1 << 19  # bytes of a file that is read from end to end
LEAST = 5  # seconds of a column
MOST_DAYS = 400  # a clock that is wrong by years is none of the job's time


@dataclass(frozen=True)
class Machines:
    """Name of a metric -> the columns (seconds since the start) -> a value of each node there."""

    nodes: list[int]
    columns: list[int]
    values: dict[str, list[list[float | None]]]  # a row for each node

    def line(self, name: str, row: int) -> Curve:
        """Return the curve of one node."""
        pairs = [
            (at, value)
            for at, value in zip(self.columns, self.values[name][row], strict=True)
            if value is not None
        ]
        return Curve([at for at, _ in pairs], [value for _, value in pairs])

    def middle(self, name: str) -> Curve:
        """Return the mean of all nodes, and their range."""
        curve = Curve()
        for at, column in zip(self.columns, zip(*self.values[name], strict=True), strict=True):
            known = [value for value in column if value is not None]
            if known:
                curve.steps.append(at)
                curve.means.append(sum(known) / len(known))
                curve.lows.append(min(known))
                curve.highs.append(max(known))
        return curve


def read(outputs: Path, record: JobRecord, columns: int = COLUMNS) -> Machines | None:
    """Read the files of all nodes; of large ones a few lines for each column."""
    every = node_metrics.every(outputs)
    ahead = {node.index: node.clock for node in record.nodes}
    known = {
        node: list(told_by(node_metrics.clocks(paths, ahead.get(node, 0.0)), columns))
        for node, paths in every.items()
    }
    known = {node: kept for node, pairs in known.items() if (kept := since(record, pairs))}
    if not known:
        return None
    last = max(seconds for pairs in known.values() for seconds, _ in pairs)
    width = max(LEAST, math.ceil((last + 1) / columns))
    count = int(last // width) + 1
    names = dict.fromkeys(name for pairs in known.values() for _, v in pairs for name in v)
    return Machines(
        list(known),
        [at * width for at in range(count)],
        {name: [row(pairs, name, width, count) for pairs in known.values()] for name in names},
    )


def since(
    record: JobRecord, pairs: Sequence[tuple[float, dict[str, float]]]
) -> list[tuple[float, dict[str, float]]]:
    """Count from the start of the job; a clock that is wrong by years tells nothing."""
    moved = ((time - record.started, values) for time, values in pairs)
    return [(at, values) for at, values in moved if 0 <= at < MOST_DAYS * 86400]


def row(
    pairs: Sequence[tuple[float, Mapping[str, float]]], name: str, width: int, count: int
) -> list[float | None]:
    sums, counts = [0.0] * count, [0] * count
    for seconds, values in pairs:
        if name in values:
            sums[int(seconds // width)] += values[name]
            counts[int(seconds // width)] += 1
    return [total / of if of else None for total, of in zip(sums, counts, strict=True)]


def told_by(paths: Mapping[Path, float], columns: int) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield the times by the head's clock, and the values; `paths` has how far each is ahead."""
    for path, ahead in paths.items():
        for sample in few(path, columns) if large(path) else node_metrics.samples(path):
            yield sample.time - ahead, values(sample)


def large(path: Path) -> bool:
    try:
        return path.stat().st_size > WHOLE
    except OSError:
        return False


def few(path: Path, columns: int) -> Iterator[NodeSample]:
    """Yield the samples at two places of each column."""
    try:
        with files.open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            for place in range(columns * 2):
                file.seek(size * place // (columns * 2))
                if place:
                    file.readline(LONGEST)  # the rest of a line
                line = parsed(file.readline(LONGEST))
                found = node_metrics.sample(line) if line is not None else None
                if found is not None:
                    yield found
    except OSError:
        return


def values(sample: NodeSample) -> dict[str, float]:
    """Return what is drawn of a sample."""
    gpus = {name: [v for v in each if v is not None] for name, each in sample.gpus.items()}
    named = {
        "cpu": sample.cpu,
        "memory": sample.memory,
        "swap": sample.swap or None,
        "received": sample.received if sample.cpu is not None else None,
        "sent": sample.sent if sample.cpu is not None else None,
        "disk_read": sample.disk_read,
        "disk_write": sample.disk_write,
        "gpu": sample.gpu("use"),
        "gpu_memory": sum(gpus["memory_bytes"]) if gpus.get("memory_bytes") else None,
        "celsius": max(gpus["celsius"]) if gpus.get("celsius") else None,
        "watts": sum(gpus["watts"]) if gpus.get("watts") else None,
        "mhz": sample.gpu("mhz"),
    }
    return {name: value for name, value in named.items() if value is not None}
