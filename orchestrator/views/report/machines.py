"""Reads what the nodes' machines did into curves over the time of the job: a row for each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.records.experiment import JobRecord
from orchestrator.records.metrics import curves, samples
from orchestrator.records.metrics.curves import CACHE, Curve, FileSums, Measured
from orchestrator.records.metrics.lines import Line
from orchestrator.records.metrics.samples import Sample

COLUMNS = 200
LEAST = 5  # seconds of a column, or a multiple
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
    ahead = {node.index: node.clock for node in record.nodes}
    every = {
        node: [
            sums_of(path, record.started + more, columns)
            for path, more in samples.clocks(paths, ahead.get(node, 0.0)).items()
        ]
        for node, paths in samples.every(outputs).items()
    }
    CACHE.make_room()
    every = {node: parts for node, parts in every.items() if any(part.columns for part in parts)}
    parts = [part for of_node in every.values() for part in of_node]
    shift, _, last = curves.shared_columns(parts, columns, 0)
    if last < 0:
        return None
    names = dict.fromkeys(name for part in parts for name in part.metrics)
    return Machines(
        list(every),
        [at * LEAST << shift for at in range(last + 1)],
        {name: [row(parts, name, shift, last) for parts in every.values()] for name in names},
    )


def sums_of(path: Path, began: float, columns: int) -> FileSums:
    """Read one file; the job began at that time by the clock of its machine."""

    def measured(line: Line) -> Measured | None:
        sample = samples.sample_of(line)
        if sample is None or not 0 <= sample.time - began < MOST_DAYS * 86400:
            return None  # a clock that is wrong by years tells nothing
        return int((sample.time - began) // LEAST), values(sample)

    return CACHE.read(path, began, measured, columns, 2 * columns)


def row(parts: Sequence[FileSums], name: str, shift: int, last: int) -> list[float | None]:
    """Return what a node did in each column: in its attempts it may have had several machines."""
    rows = [part.means(name, shift, 0, last) for part in parts]
    known = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    return [sum(each) / len(each) if each else None for each in known]


def values(sample: Sample) -> dict[str, float]:
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
