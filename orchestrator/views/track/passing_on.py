"""Pass the numbers of an experiment on to a tracker, as they come home, each of them once.

How far that is is kept in the experiment: whoever tracks it later goes on from there.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.common.files import open_plain
from orchestrator.common.text import Say
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.goodput import ahead_at
from orchestrator.records.metrics import samples, trainers
from orchestrator.records.metrics.lines import GrowingFile, Line
from orchestrator.records.metrics.samples import Sample
from orchestrator.trackers.known import Curves, opened
from orchestrator.trackers.sending import Sending

KEPT = ".tracked_{}_{}"  # of what, by whom: how far each file is passed on
REACHED, FILES = "reached", "files"
LARGEST_BYTES = 1 << 20
PIECE_BYTES = 1 << 16  # of a file that are passed on together
MOST_VALUES = 200  # of one line
NO_CURVE = ("time", "rank", "step", "steps", "left_s")

Value = tuple[Mapping[str, float], int, float]  # values, of a step, at a moment


class PassingOn:
    """One kind of numbers of one experiment, on their way to one tracker."""

    kind = ""
    axis = ""  # what its steps count, where they are not those of the training

    def __init__(
        self,
        experiment: Experiment,
        record: JobRecord,
        tracker: str,
        options: Mapping[str, Any],
        say: Say,
    ) -> None:
        self.experiment, self.record = experiment, record
        self.kept_in = KEPT.format(self.kind, tracker)
        kept = self.kept()
        self.reached: dict[str, int] = kept.get(REACHED, {})  # of each file the last step told
        self.files = {name: self.file(name, *at) for name, at in kept.get(FILES, {}).items()}
        self.count = 0
        self.coming: Iterator[Value | None] | None = None  # of the look that is not done yet
        # How many values had to be sent, and how far the files were read then.
        self.places: deque[tuple[int, dict[str, Any]]] = deque()
        first = record.attempts[0].job if record.attempts else record.job
        name = f"{experiment.name} ({self.kind})"
        curves = Curves(
            f"{self.kind}-{first}", name, 0, self.outputs / "tracked", beside=True, axis=self.axis
        )
        self.to = Sending(tracker, partial(opened, tracker, curves, options), say)

    @property
    def outputs(self) -> Path:
        return self.experiment.path / "outputs"

    def pass_on(self, record: JobRecord) -> bool:
        """Pass on what is new, as far as the tracker has room for it; tell whether that was all."""
        self.record = record
        self.keep()
        if self.to.failed:
            return True
        if self.coming is None:
            self.coming = self.new()
        while not self.to.half_full:  # a piece has fewer lines than the other half takes
            for curve in self.coming:
                if curve is None:
                    self.places.append((self.count, self.here()))
                    break
                self.to.log(*curve)
                self.count += 1
            else:
                self.coming = None
                return True
        return False

    def new(self) -> Iterator[Value | None]:
        """Yield what is new, and None where a piece of a file is done."""
        raise NotImplementedError

    def lines(self, name: str) -> Iterator[Line | None]:
        added = self.files.setdefault(name, self.file(name))
        while lines := added.read():
            yield from lines
            yield None

    def file(self, name: str, at: int = 0, mark: int | None = None) -> GrowingFile:
        return GrowingFile(self.outputs / name, at, PIECE_BYTES, mark)

    def kept(self) -> dict[str, Any]:
        try:
            with open_plain(self.experiment.path / self.kept_in) as file:
                data = json.loads(file.read(LARGEST_BYTES))
            return {
                FILES: {n: (int(at), int(mark)) for n, (at, mark) in data[FILES].items()},
                REACHED: {name: int(step) for name, step in data[REACHED].items()},
            }
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return {}

    def here(self) -> dict[str, Any]:
        read = {name: (added.at, added.mark) for name, added in self.files.items() if added.at}
        return {FILES: read, REACHED: dict(self.reached)}

    def keep(self) -> None:
        """Write down how far the tracker has taken what was read, and no further."""
        taken = None
        while self.places and self.places[0][0] <= self.to.sent:
            taken = self.places.popleft()[1]
        if taken is None:
            return
        try:
            self.experiment.write(self.kept_in, json.dumps(taken))
        except OSError as error:
            path = self.experiment.path / self.kept_in
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error


class OfRanks(PassingOn):
    """Passes on what rank 0 measures, by its steps; steps that an attempt repeats are told once."""

    kind = "training"

    def new(self) -> Iterator[Value | None]:
        name = trainers.file_name(0)
        if not trainers.measured(self.outputs):
            name = f"../{trainers.printed(self.outputs).name}/{name}"
        yield from self.steps(name, "")

    def steps(self, name: str, prefix: str) -> Iterator[Value | None]:
        for line in self.lines(name):
            if line is None:
                yield None
                continue
            point = trainers.Point(line)
            step, moment = point.step, point.number("time")
            if step is None or moment is None:
                continue
            if step >= self.reached.get(name, -1):
                self.reached[name] = step
                numbers = point.numbers(MOST_VALUES, NO_CURVE)
                values = {f"{prefix}{metric}": value for metric, value in numbers.items()}
                yield values, step, moment - ahead_at(self.record, moment)


class OfLaterTrainers(OfRanks):
    """Passes on the same of the second Trainer of a program, and of those after it.

    All of them share one run, in which the steps of each begin again.
    """

    kind = "trainers"
    axis = "trainer_step"

    @classmethod
    def are_there(cls, outputs: Path) -> bool:
        return bool(cls.numbers(outputs))

    @staticmethod
    def numbers(outputs: Path) -> list[int]:
        every = trainers.every(outputs).items()
        return [trainer for trainer, files in every if trainer > 1 and 0 in files]

    def new(self) -> Iterator[Value | None]:
        for trainer in self.numbers(self.outputs):
            yield from self.steps(trainers.file_name(0, trainer), f"trainer_{trainer}/")


class OfNodes(PassingOn):
    """Passes on what each node's sampler measures; its steps are seconds since the start."""

    kind = "nodes"
    axis = "seconds"

    def new(self) -> Iterator[Value | None]:
        clocks = {node.index: node.clock for node in self.record.nodes}
        for node, paths in samples.every(self.outputs).items():
            for path in paths:
                host, ahead = "", 0.0
                for line in self.lines(path.name):
                    if line is None:
                        yield None
                        continue
                    if not host:
                        host = samples.machine(path).host or f"node {node}"
                        ahead = samples.clocks(paths, clocks.get(node, 0.0))[path]
                    if (sample := samples.sample_of(line)) is None:
                        continue
                    if named := {f"node/{host}/{name}": v for name, v in numbers_of(sample)}:
                        moment = sample.time - ahead
                        yield named, max(0, int(moment - self.record.started)), moment


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
