"""Pass the numbers of an experiment on to a tracker, as they come home, each of them once.

How far that is is kept in the experiment: whoever tracks it later goes on from there.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.files import open_plain
from orchestrator.head.track import values
from orchestrator.records import node_metrics
from orchestrator.records.added_lines import AddedLines
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.last_metrics import number
from orchestrator.trackers.known import KNOWN, Curves
from orchestrator.trackers.sending import Sending

KEPT = ".tracked_{}_{}"  # of what, by whom: how far each file is passed on
REACHED = "reached"
LARGEST = 1 << 20
PIECE = 1 << 16  # bytes of a file that are passed on together

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
        say: Callable[[str], None],
    ) -> None:
        self.experiment, self.started = experiment, record.started
        self.kept_in = KEPT.format(self.kind, tracker)
        kept = self.kept()
        self.reached = kept.pop(REACHED, -1)  # the last step that was told
        self.files = {name: self.file(name, at) for name, at in kept.items()}
        self.count = 0
        self.coming: Iterator[Value | None] | None = None  # of the look that is not done yet
        # How many values had to be sent, and how far the files were read then.
        self.places: deque[tuple[int, dict[str, int]]] = deque()
        first = record.attempts[0].job if record.attempts else record.job
        name = f"{experiment.name} ({self.kind})"
        curves = Curves(
            f"{self.kind}-{first}", name, 0, self.outputs / "tracked", beside=True, axis=self.axis
        )
        try:
            opened = KNOWN[tracker].open(curves, **options)
        except OrchestratorError:
            raise
        except Exception as error:  # each has its own: no key, no server, no such directory
            raise UsageError(f"{tracker} could not be opened: {error}") from error
        self.to = Sending(tracker, opened, say)

    @property
    def outputs(self) -> Path:
        return self.experiment.path / "outputs"

    def look(self) -> bool:
        """Pass on what is new, as far as the tracker has room for it; tell whether that was all."""
        self.keep()
        if self.to.failed:
            return True
        if self.coming is None:
            self.coming = self.new()
        while not self.to.half_full:  # a piece has fewer lines than the other half takes
            for told in self.coming:
                if told is None:
                    self.places.append((self.count, self.here()))
                    break
                self.to.log(*told)
                self.count += 1
            else:
                self.coming = None
                return True
        return False

    def new(self) -> Iterator[Value | None]:
        """Yield what is new, and None where a piece of a file is done."""
        raise NotImplementedError

    def lines(self, name: str) -> Iterator[dict[str, Any] | None]:
        added = self.files.setdefault(name, self.file(name))
        while lines := added.read():
            yield from lines
            yield None

    def file(self, name: str, at: int = 0) -> AddedLines:
        return AddedLines(self.outputs / name, at, PIECE)

    def kept(self) -> dict[str, int]:
        try:
            with open_plain(self.experiment.path / self.kept_in) as file:
                data = json.loads(file.read(LARGEST))
            return {str(name): int(at) for name, at in data.items() if "/" not in name}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def here(self) -> dict[str, int]:
        return {name: added.at for name, added in self.files.items()} | {REACHED: self.reached}

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
        for line in self.lines("rank_00_metrics.jsonl"):
            if line is None:
                yield None
                continue
            step, moment = number(line, "step"), number(line, "time")
            if step is not None and moment is not None and step >= self.reached:
                self.reached = int(step)
                yield values.of_rank(line), int(step), moment


class OfNodes(PassingOn):
    """Passes on what each node's sampler measures; its steps are seconds since the start."""

    kind = "nodes"
    axis = "seconds"

    def new(self) -> Iterator[Value | None]:
        for node, paths in node_metrics.every(self.outputs).items():
            for path in paths:
                host = node_metrics.about(path).host or f"node {node}"
                for line in self.lines(path.name):
                    if line is None:
                        yield None
                    elif named := values.of_node(line, host):
                        moment = number(line, "time") or 0.0
                        yield named, max(0, int(moment - self.started)), moment
