"""Reads the files of the nodes' samplers: outputs/node_<NN>_metrics.jsonl, one for each attempt.

A line has the time, the node, and either `about` (the machine) or a sample. The lines come from
nodes, so a line with a wrong value is skipped.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from orchestrator.protocol.message import Check, Moment, Nonsense, decode_value
from orchestrator.records.metrics.lines import GrowingFile, Line, last_lines, numbered_files

FILE = re.compile(r"node_(\d{2,6})_metrics(?:_(\d{1,6}))?\.jsonl")
T = TypeVar("T")
# Few samples are longer.
SAMPLE_BYTES = 1 << 14
# The first part of a file, which has the description of the machine.
BEGINNING_BYTES = 1 << 18
# The most GPUs, interfaces and disks.
FEW = Check("few values", lambda values: len(values) <= 64)
Pairs = Annotated[dict[str, tuple[float, float]], FEW]
Columns = Annotated[dict[str, Annotated[list[float | None], FEW]], FEW]
# Names in a file, where they differ from those here.
NAMES = {
    "memory_bytes": "memory",
    "swap_bytes": "swap",
    "disk_read_per_s": "disk_read",
    "disk_write_per_s": "disk_write",
    "gpu": "gpus",
}


@dataclass(frozen=True)
class Sample:
    """A machine's load at one moment: shares from 0 to 1, bytes, bytes a second."""

    time: Moment
    cpu: float | None = None
    iowait: float | None = None
    load: float | None = None
    memory: float | None = None
    swap: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    # Received and sent bytes per second, by interface.
    net: Pairs = field(default_factory=dict)
    # Free and total bytes, by disk.
    disks: Pairs = field(default_factory=dict)
    # A value for each GPU, by metric.
    gpus: Columns = field(default_factory=dict)

    @property
    def received(self) -> float:
        return sum(pair[0] for pair in self.net.values())

    @property
    def sent(self) -> float:
        return sum(pair[1] for pair in self.net.values())

    def gpu(self, name: str) -> float | None:
        """Return the mean over all GPUs of one of their values."""
        known = [value for value in self.gpus.get(name, []) if value is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class AttemptMachine:
    """The machine that was the node in one attempt."""

    host: str = ""
    # The models of its GPUs.
    gpus: Annotated[tuple[str, ...], FEW] = ()


# -- the files --------------------------------------------------------------------------------


def list_sample_files(outputs: Path) -> dict[int, list[Path]]:
    """Return the files of each node, in the order of attempts."""
    return {node: [*parts.values()] for node, parts in numbered_files(outputs, FILE).items()}


def newest_sample_file(outputs: Path, node: int) -> Path | None:
    """Return the file of a node's last attempt, or None."""
    return list_sample_files(outputs).get(node, [None])[-1]


def read_machine(path: Path) -> AttemptMachine:
    """Return the machine by the last description near the start: GPUs may follow later."""
    lines = GrowingFile(path, piece=BEGINNING_BYTES).read()
    known = (decoded(AttemptMachine, line.get("about")) for line in reversed(lines))
    return next(filter(None, known), AttemptMachine())


def read_last_samples(path: Path, most: int = 1) -> list[Sample]:
    """Return the last samples of a file, in order."""
    known = filter(None, map(sample_of, last_lines(path, most * SAMPLE_BYTES)))
    return list(itertools.islice(known, most))[::-1]


# -- lines ------------------------------------------------------------------------------------


def decoded(kind: type[T], data: Any) -> T | None:
    """Return data of a node as this type, or None if it is something else."""
    with contextlib.suppress(Nonsense):
        return decode_value(kind, data, newer=True)
    return None


def sample_of(line: Line) -> Sample | None:
    """Return the sample in a line, or None if it has something else."""
    known = {NAMES.get(name, name): value for name, value in line.items()}
    return None if "about" in line else decoded(Sample, known)
