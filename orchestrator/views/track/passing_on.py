"""Pass the numbers of an experiment on to a tracker, as they come home, each of them once.

How far that is is kept in the experiment: a later call goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.common.errors import UsageError
from orchestrator.common.files import open_plain
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.goodput import ahead_at
from orchestrator.records.metrics import samples, trainers
from orchestrator.records.metrics.lines import GrowingFile, Line
from orchestrator.records.metrics.samples import Sample
from orchestrator.trackers.known import Curves, opened

KEPT = ".tracked_{}_{}"  # of what, by which tracker: how far each file is passed on
REACHED, FILES = "reached", "files"
LARGEST_BYTES = 1 << 20
PIECE_BYTES = 1 << 16  # of a file, after which is noted how far it is passed on
MOST_VALUES = 200  # of one line
NO_CURVE = ("time", "rank", "step", "steps", "left_s")


class Value(NamedTuple):
    """Values of a step, at a moment."""

    values: Mapping[str, float]
    step: int
    moment: float


class PassingOn:
    """One kind of numbers of one experiment, on their way to one tracker."""

    def __init__(
        self, experiment: Experiment, record: JobRecord, kind: str, name: str, options: Any
    ) -> None:
        self.experiment, self.kind, self.name = experiment, kind, name
        self.path = experiment.path / KEPT.format(kind, name)
        kept = read_kept(self.path)
        self.reached: dict[str, int] = kept.get(REACHED, {})  # of each file the last step told
        self.files = {name: self.file(name, *at) for name, at in kept.get(FILES, {}).items()}
        self.sent = 0
        first = record.attempts[0].job if record.attempts else record.job
        curves = Curves(
            f"{kind}-{first}",
            f"{experiment.name} ({kind})",
            0,
            self.outputs / "tracked",
            beside=True,
            axis=KINDS[kind].axis,
        )
        self.tracker = opened(name, curves, options)

    @property
    def outputs(self) -> Path:
        return self.experiment.path / "outputs"

    def pass_on(self, record: JobRecord) -> None:
        """Pass on what is new."""
        sent = self.sent
        for value in KINDS[self.kind].new(self, record):
            if value is not None:
                self.tracker.log(*value)
                self.sent += 1
            elif self.sent > sent:
                self.keep()

    def lines(self, name: str) -> Iterator[Line | None]:
        """Yield what is new in a file, and None where a piece of it is done."""
        added = self.files.setdefault(name, self.file(name))
        while lines := added.read():
            yield from lines
            yield None

    def file(self, name: str, at: int = 0, mark: int | None = None) -> GrowingFile:
        return GrowingFile(self.outputs / name, at, PIECE_BYTES, mark)

    def keep(self) -> None:
        """Write down how far the tracker has taken what was read."""
        read = {name: (added.at, added.mark) for name, added in self.files.items() if added.at}
        try:
            text = json.dumps({FILES: read, REACHED: self.reached})
            self.experiment.write(self.path.name, text)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}") from error

    def steps(self, record: JobRecord, name: str, prefix: str = "") -> Iterator[Value | None]:
        """Yield what a rank measured; steps that an attempt repeats are told once."""
        for line in self.lines(name):
            if line is None:
                yield None
                continue
            point = trainers.Point(line)
            step, moment = point.step, point.number("time")
            if step is None or moment is None or step < self.reached.get(name, -1):
                continue
            self.reached[name] = step
            numbers = point.numbers(MOST_VALUES, NO_CURVE)
            values = {f"{prefix}{metric}": value for metric, value in numbers.items()}
            yield Value(values, step, moment - ahead_at(record, moment))


def read_kept(path: Path) -> dict[str, Any]:
    try:
        with open_plain(path) as file:
            data = json.loads(file.read(LARGEST_BYTES))
        return {
            FILES: {name: (int(at), int(mark)) for name, (at, mark) in data[FILES].items()},
            REACHED: {name: int(step) for name, step in data[REACHED].items()},
        }
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


# -- the kinds of numbers -------------------------------------------------------------------------


def of_rank_0(passing: PassingOn, record: JobRecord) -> Iterator[Value | None]:
    """Yield what rank 0 measures, by its steps, or what is read from its prints."""
    name = trainers.file_name(0)
    if not trainers.measured(passing.outputs):
        name = f"../{trainers.printed(passing.outputs).name}/{name}"
    yield from passing.steps(record, name)


def of_later_trainers(passing: PassingOn, record: JobRecord) -> Iterator[Value | None]:
    """Yield the same of a program's second Trainer, and of those after it: their steps begin
    again, and all share one run."""
    for trainer in later_trainers(passing.outputs):
        name = trainers.file_name(0, trainer)
        yield from passing.steps(record, name, f"trainer_{trainer}/")


def later_trainers(outputs: Path) -> list[int]:
    every = trainers.every(outputs).items()
    return [trainer for trainer, files in every if trainer > 1 and 0 in files]


def of_nodes(passing: PassingOn, record: JobRecord) -> Iterator[Value | None]:
    """Yield what each node's sampler measures; its steps are seconds since the start."""
    clocks = {node.index: node.clock for node in record.nodes}
    for node, paths in samples.every(passing.outputs).items():
        for path in paths:
            host = samples.machine(path).host or f"node {node}"
            ahead = samples.clocks(paths, clocks.get(node, 0.0))[path]
            for line in passing.lines(path.name):
                sample = line and samples.sample_of(line)
                if line is None:
                    yield None
                elif sample and (found := {f"node/{host}/{n}": v for n, v in numbers_of(sample)}):
                    moment = sample.time - ahead
                    yield Value(found, max(0, int(moment - record.started)), moment)


class Kind(NamedTuple):
    """The axis of a curve, empty for the steps of the training, and the reader of new values."""

    axis: str
    new: Callable[[PassingOn, JobRecord], Iterator[Value | None]]


KINDS = {
    "training": Kind("", of_rank_0),
    "nodes": Kind("seconds", of_nodes),
    "trainers": Kind("trainer_step", of_later_trainers),
}


def numbers_of(sample: Sample) -> Iterator[tuple[str, float]]:
    """Yield the names and values of a sample, as far as they are known."""
    for name in ("cpu", "iowait", "load", "memory", "swap", "disk_read", "disk_write"):
        value = getattr(sample, name)
        if value is not None:
            yield name, value
    for interface, (received, sent) in sample.net.items():
        yield f"net/{interface}/received", received
        yield f"net/{interface}/sent", sent
    for mount, (free, size) in sample.disks.items():
        if size:
            yield f"disk{mount.rstrip('/')}/used", 1 - free / size  # never an empty part
    for name, values in sample.gpus.items():
        for gpu, value in enumerate(values):
            if value is not None:
                yield f"gpu/{gpu}/{name}", value
