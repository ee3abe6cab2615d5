"""Reads what the nodes' samplers wrote: outputs/node_<NN>_metrics.jsonl, a file for each attempt.

A line has the time, the node, and either `about` (the machine), `cause` (a notice, with `text` and
`fix`), or a sample. The lines come from nodes: what is no number is passed over.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.records.added_lines import AddedLines, parsed
from orchestrator.records.last_metrics import number

FILE = re.compile(r"node_(\d{2,6})_metrics(?:_(\d{1,6}))?\.jsonl")
LONGEST = 1 << 16  # bytes of a line
SAMPLE = 1 << 10  # bytes of a usual one
BEGINNING = 1 << 18  # bytes in which the machine is described
MOST_GPUS = 64
MOST_NAMES = 64  # of interfaces, of disks


@dataclass(frozen=True)
class NodeSample:
    """A machine's load at one moment: shares from 0 to 1, bytes, bytes a second."""

    time: float
    cpu: float | None = None
    iowait: float | None = None
    load: float | None = None
    memory: float | None = None
    swap: float | None = None
    swap_rate: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    net: dict[str, tuple[float, float]] = field(default_factory=dict)  # came, and went
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
class About:
    """The machine that took a node's place in one attempt."""

    host: str = ""
    cpus: int = 0
    memory: float = 0.0
    models: tuple[str, ...] = ()
    places: tuple[str, ...] = ()  # of each GPU, on the PCI bus
    gpus: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Notice:
    """Something that the log told of a machine."""

    time: float
    node: int
    cause: str
    text: str


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
    return {node: [each[key] for key in sorted(each)] for node, each in sorted(found.items())}


def newest(outputs: Path, node: int) -> Path | None:
    """Return the file that a node writes now."""
    return every(outputs).get(node, [None])[-1]


def clocks(paths: Sequence[Path], ahead: float) -> dict[Path, float]:
    """Return how far the clock of each of a node's files is ahead: of the machine that is there
    now it is known, and of another that was there before it is not."""
    if not ahead:
        return dict.fromkeys(paths, 0.0)
    hosts = {path: about(path).host for path in paths}
    return {path: ahead if host == hosts[paths[-1]] else 0.0 for path, host in hosts.items()}


def about(path: Path) -> About:
    """Describe the machine, by the last description near the beginning: GPUs take a moment."""
    try:
        status = path.stat()
    except OSError:
        return About()
    return _about(path, status.st_ino, min(status.st_size, BEGINNING))


@functools.lru_cache(1024)  # an open page asks every few seconds
def _about(path: Path, _inode: int, _size: int) -> About:
    found: dict[str, Any] = {}
    for line in lines(path, BEGINNING):
        if isinstance(line.get("about"), dict):
            found = line["about"]
    return described(found)


def described(found: dict[str, Any]) -> About:
    """Read the description of a machine that a line holds."""
    models, places, gpus = found.get("gpus"), found.get("gpus_at"), found.get("gpu")
    return About(
        host=str(found.get("host", ""))[:255],
        cpus=int(number(found, "cpus") or 0),
        memory=number(found, "memory_bytes") or 0.0,
        models=tuple(map(str, models[:MOST_GPUS])) if isinstance(models, list) else (),
        places=tuple(map(str, places[:MOST_GPUS])) if isinstance(places, list) else (),
        gpus=columns(gpus),
    )


def samples(path: Path) -> Iterator[NodeSample]:
    """Yield the samples of a file in their order."""
    for line in lines(path):
        found = sample(line)
        if found is not None:
            yield found


class Notices:
    """One machine's metrics in one attempt; each look reads only what is new."""

    def __init__(self, path: Path, node: int) -> None:
        self.node = node
        self.added = AddedLines(path, having=b'"cause":')
        self.known: dict[Notice, None] = {}  # each once, should the file begin anew
        self.lock = threading.Lock()  # pages are filled at the same time

    def look(self) -> list[Notice]:
        with self.lock:
            while lines := self.added.read():
                found = (notice(line, self.node) for line in lines)
                self.known.update((each, None) for each in found if each is not None)
            return list(self.known)


def notice(line: dict[str, Any], node: int) -> Notice | None:
    when, text = number(line, "time"), line.get("text")
    if when is None or not isinstance(line.get("cause"), str):
        return None
    return Notice(when, node, line["cause"], text if isinstance(text, str) else "")


class Recent:
    """The last samples of one file, which grows: each look reads only what is new.

    `about` is the machine as it was described last.
    """

    def __init__(self, path: Path, keep: int = 60) -> None:
        self.path = path
        self.samples: deque[NodeSample] = deque(maxlen=keep)
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        self.added = AddedLines(path, max(0, size - keep * SAMPLE))
        self.about = about(path)

    def look(self) -> deque[NodeSample]:
        while lines := self.added.read():
            self.samples.extend(found for line in lines if (found := sample(line)) is not None)
            for line in lines:
                if isinstance(line.get("about"), dict):
                    self.about = described(line["about"])
        return self.samples


# -- lines ------------------------------------------------------------------------------------


def lines(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file, or of its beginning."""
    try:
        with files.open_plain(path) as file:
            while (most is None or file.tell() < most) and (raw := file.readline(LONGEST)):
                if (line := parsed(raw)) is not None:
                    yield line
    except OSError:
        return


def sample(line: dict[str, Any]) -> NodeSample | None:
    """Return the sample that a line holds; None for one that holds something else."""
    when = number(line, "time")
    if when is None or "about" in line or "cause" in line:
        return None
    return NodeSample(
        time=when,
        cpu=number(line, "cpu"),
        iowait=number(line, "iowait"),
        load=number(line, "load"),
        memory=number(line, "memory_bytes"),
        swap=number(line, "swap_bytes"),
        swap_rate=number(line, "swap_per_s"),
        disk_read=number(line, "disk_read_per_s"),
        disk_write=number(line, "disk_write_per_s"),
        net=pairs(line.get("net")),
        disks=pairs(line.get("disks")),
        gpus=columns(line.get("gpu")),
    )


def pairs(data: Any) -> dict[str, tuple[float, float]]:
    found = {}
    for name, values in list(data.items())[:MOST_NAMES] if isinstance(data, dict) else ():
        if isinstance(values, list) and len(values) == 2:
            first, second = (number({"": value}, "") for value in values)
            if first is not None and second is not None:
                found[name] = (first, second)
    return found


def columns(data: Any) -> dict[str, list[float | None]]:
    return {
        name: [number({"": value}, "") for value in values[:MOST_GPUS]]
        for name, values in (list(data.items())[:MOST_NAMES] if isinstance(data, dict) else ())
        if isinstance(values, list)
    }
