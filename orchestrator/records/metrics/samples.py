"""Read what the nodes' samplers wrote: outputs/node_<NN>_metrics.jsonl, a file for each attempt.

A line has the time, the node, and either `about` (the machine), `cause` (an event, with `text` and
`fix`), or a sample. The lines come from nodes: what is no number is passed over.
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
SAMPLE_BYTES = 1 << 10  # of a usual one
BEGINNING_BYTES = 1 << 18  # in which the machine is described
MOST_GPUS = 64
MOST_NAMES = 64  # of interfaces, of disks


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
    net: dict[str, tuple[float, float]] = field(default_factory=dict)  # received, and sent
    disks: dict[str, tuple[float, float]] = field(default_factory=dict)  # free, and in all
    gpus: dict[str, list[float | None]] = field(default_factory=dict)  # a value for each GPU

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
    """The machine that took a node's place in one attempt."""

    host: str = ""
    models: tuple[str, ...] = ()  # of its GPUs


@dataclass(frozen=True)
class MachineEvent:
    """Something that the log told of a machine."""

    time: float
    node: int
    cause: str
    text: str


# -- the files --------------------------------------------------------------------------------


def every(outputs: Path) -> dict[int, list[Path]]:
    """Find the files: node -> one for each attempt, the first attempt's first."""
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
    """Return the file that a node writes now."""
    return every(outputs).get(node, [None])[-1]


def clocks(paths: Sequence[Path], ahead: float) -> dict[Path, float]:
    """Return how far the clock of each of a node's files is ahead: of the machine that is there
    now it is known, and of another that was there before it is not."""
    if not ahead:
        return dict.fromkeys(paths, 0.0)
    hosts = {path: machine(path).host for path in paths}
    return {path: ahead if host == hosts[paths[-1]] else 0.0 for path, host in hosts.items()}


def machine(path: Path) -> AttemptMachine:
    """Describe the machine, by the last description near the beginning: GPUs take a moment."""
    try:
        status = path.stat()
    except OSError:
        return AttemptMachine()
    return _machine(path, status.st_ino, min(status.st_size, BEGINNING_BYTES))


@functools.lru_cache(1024)  # an open page asks every few seconds
def _machine(path: Path, _inode: int, _size: int) -> AttemptMachine:
    lines = GrowingFile(path, piece=BEGINNING_BYTES).read()
    return next(
        (known for line in reversed(lines) if (known := machine_of(line))), AttemptMachine()
    )


class RecentSamples:
    """The last samples of one file, which grows: only what is new is read.

    `machine` is the machine as it was described last.
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
    """Reads what one machine's log told in one attempt; only what is new."""

    def __init__(self, path: Path, node: int) -> None:
        self.node = node
        self.file = GrowingFile(path, having=b'"cause":')
        self.known: dict[MachineEvent, None] = {}  # each once, should the file begin again

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
    """Return the description of a machine that a line holds; None for one without."""
    about = line.get("about")
    if not isinstance(about, dict):
        return None
    models = about.get("gpus")
    return AttemptMachine(
        host=str(about.get("host", ""))[:255],
        models=tuple(map(str, models[:MOST_GPUS])) if isinstance(models, list) else (),
    )


def sample_of(line: Line) -> Sample | None:
    """Return the sample that a line holds; None for one that holds something else."""
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
