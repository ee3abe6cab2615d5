"""Reads the files of the nodes' samplers: outputs/node_<NN>_metrics.jsonl, one for each attempt.

A line has the time, the node, and either `about` (the machine), `cause` (an event, with `text` and
`fix`), or a sample. The lines come from nodes, so values that are no numbers are skipped.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.records.metrics.lines import GrowingFile, Line, number

FILE = re.compile(r"node_(\d{2,6})_metrics(?:_(\d{1,6}))?\.jsonl")
# The size of a usual sample.
SAMPLE_BYTES = 1 << 10
# The first part of a file, which has the description of the machine.
BEGINNING_BYTES = 1 << 18
MOST_GPUS = 64
# The most interfaces and disks.
MOST_NAMES = 64


@dataclass(frozen=True)
class Sample:
    """A machine's load at one moment: shares from 0 to 1, bytes, bytes a second."""

    time: float
    cpu: float | None = None
    iowait: float | None = None
    load: float | None = None
    memory: float | None = None
    swap: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    # Received and sent bytes per second, by interface.
    net: dict[str, tuple[float, float]] = field(default_factory=dict)
    # Free and total bytes, by disk.
    disks: dict[str, tuple[float, float]] = field(default_factory=dict)
    # A value for each GPU, by metric.
    gpus: dict[str, list[float | None]] = field(default_factory=dict)

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
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class MachineEvent:
    """An event in the log of a machine."""

    time: float
    node: int
    cause: str
    text: str


# -- the files --------------------------------------------------------------------------------


def every(outputs: Path) -> dict[int, list[Path]]:
    """Return the files of each node, in the order of attempts."""
    found: dict[int, dict[int, Path]] = {}
    try:
        paths = list(outputs.iterdir())
    except OSError:
        return {}
    for path in paths:
        if match := FILE.fullmatch(path.name):
            found.setdefault(int(match[1]), {})[int(match[2] or 1)] = path
    return {node: [parts[key] for key in sorted(parts)] for node, parts in sorted(found.items())}


def newest(outputs: Path, node: int) -> Path | None:
    """Return the file of a node's last attempt, or None."""
    return every(outputs).get(node, [None])[-1]


def clocks(paths: Sequence[Path], ahead: float) -> dict[Path, float]:
    """Return by how much the clock of each of a node's files is ahead of the head's.

    It is known for the present machine. For the files of earlier machines, it is 0.
    """
    if not ahead:
        return dict.fromkeys(paths, 0.0)
    hosts = {path: machine(path).host for path in paths}
    return {path: ahead if host == hosts[paths[-1]] else 0.0 for path, host in hosts.items()}


def machine(path: Path) -> AttemptMachine:
    """Return the machine by the last description near the start: GPUs may follow later."""
    try:
        status = path.stat()
    except OSError:
        return AttemptMachine()
    return _machine(path, status.st_ino, min(status.st_size, BEGINNING_BYTES))


# An open page calls it every few seconds.
@functools.lru_cache(1024)
def _machine(path: Path, _inode: int, _size: int) -> AttemptMachine:
    lines = GrowingFile(path, piece=BEGINNING_BYTES).read()
    return next(
        (known for line in reversed(lines) if (known := machine_of(line))), AttemptMachine()
    )


class RecentSamples:
    """The last samples of one growing file, of which only new lines are read.

    `machine` has the last description of the machine.
    """

    def __init__(self, path: Path, keep: int = 60) -> None:
        self.path = path
        self.samples: deque[Sample] = deque(maxlen=keep)
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        self.file = GrowingFile(path, max(0, size - keep * SAMPLE_BYTES))
        self.machine = machine(path)

    def read(self) -> deque[Sample]:
        for line in self.file.lines():
            if (sample := sample_of(line)) is not None:
                self.samples.append(sample)
            self.machine = machine_of(line) or self.machine
        return self.samples


class Events:
    """Reads the events of one machine in one attempt, each line once."""

    def __init__(self, path: Path, node: int) -> None:
        self.node = node
        self.file = GrowingFile(path, having=b'"cause":')
        # A dict keeps each event once, even if the file starts again.
        self.known: dict[MachineEvent, None] = {}

    def read(self) -> list[MachineEvent]:
        events = (event_of(line, self.node) for line in self.file.lines())
        self.known.update((event, None) for event in events if event is not None)
        return list(self.known)


# -- lines ------------------------------------------------------------------------------------


def event_of(line: Line, node: int) -> MachineEvent | None:
    when, text = number(line.get("time")), line.get("text")
    if when is None or not isinstance(line.get("cause"), str):
        return None
    return MachineEvent(when, node, line["cause"], text if isinstance(text, str) else "")


def machine_of(line: Line) -> AttemptMachine | None:
    """Return the machine that a line describes, or None if it describes none."""
    about = line.get("about")
    if not isinstance(about, dict):
        return None
    models = about.get("gpus")
    return AttemptMachine(
        host=str(about.get("host", ""))[:255],
        models=tuple(map(str, models[:MOST_GPUS])) if isinstance(models, list) else (),
    )


def sample_of(line: Line) -> Sample | None:
    """Return the sample in a line, or None if it has something else."""
    when = number(line.get("time"))
    if when is None or "about" in line or "cause" in line:
        return None
    return Sample(
        time=when,
        cpu=number(line.get("cpu")),
        iowait=number(line.get("iowait")),
        load=number(line.get("load")),
        memory=number(line.get("memory_bytes")),
        swap=number(line.get("swap_bytes")),
        disk_read=number(line.get("disk_read_per_s")),
        disk_write=number(line.get("disk_write_per_s")),
        net=pairs(line.get("net")),
        disks=pairs(line.get("disks")),
        gpus=columns(line.get("gpu")),
    )


def pairs(data: Any) -> dict[str, tuple[float, float]]:
    known = {}
    for name, values in list(data.items())[:MOST_NAMES] if isinstance(data, dict) else ():
        if isinstance(values, list) and len(values) == 2:
            first, second = map(number, values)
            if first is not None and second is not None:
                known[name] = (first, second)
    return known


def columns(data: Any) -> dict[str, list[float | None]]:
    return {
        name: list(map(number, values[:MOST_GPUS]))
        for name, values in (list(data.items())[:MOST_NAMES] if isinstance(data, dict) else ())
        if isinstance(values, list)
    }
