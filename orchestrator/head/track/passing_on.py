"""Pass the numbers of an experiment on to a tracker, as they come home, each of them once.

How far that is is kept in the experiment: whoever tracks it later goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import UsageError
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

Value = tuple[Mapping[str, float], int, float]  # values, of a step, at a moment


class PassingOn:
    """One kind of numbers of one experiment, on their way to one tracker."""

    kind = ""

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
        self.files = {name: AddedLines(self.outputs / name, at) for name, at in kept.items()}
        self.count = 0
        first = record.attempts[0].job if record.attempts else record.job
        name = f"{experiment.name} ({self.kind})"
        curves = Curves(f"{self.kind}-{first}", name, 0, self.outputs / "tracked")
        try:
            opened = KNOWN[tracker].open(curves, **options)
        except TypeError as error:
            raise UsageError(f"{tracker} could not be opened: {error}") from error
        self.to = Sending(tracker, opened, say)

    @property
    def outputs(self) -> Path:
        return self.experiment.path / "outputs"

    def look(self) -> None:
        """Pass on what is new."""
        for told in self.new():
            self.to.log(*told)
            self.count += 1
        if self.to.lines.empty():
            self.keep()

    def close(self) -> None:
        self.to.close()
        if not self.to.failed:
            self.keep()

    def new(self) -> Iterator[Value]:
        raise NotImplementedError

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        added = self.files.setdefault(name, AddedLines(self.outputs / name))
        while lines := added.read():
            yield from lines

    def kept(self) -> dict[str, int]:
        try:
            with open_plain(self.experiment.path / self.kept_in) as file:
                data = json.loads(file.read(LARGEST))
            return {str(name): int(at) for name, at in data.items() if "/" not in name}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def keep(self) -> None:
        places = {name: added.at for name, added in self.files.items()}
        self.experiment.write(self.kept_in, json.dumps({**places, REACHED: self.reached}))


class OfRanks(PassingOn):
    """What rank 0 measures, by its steps; steps that an attempt repeats are told once."""

    kind = "training"

    def new(self) -> Iterator[Value]:
        for line in self.lines("rank_00_metrics.jsonl"):
            step, moment = number(line, "step"), number(line, "time")
            if step is not None and moment is not None and step >= self.reached:
                self.reached = int(step)
                yield values.of_rank(line), int(step), moment


class OfNodes(PassingOn):
    """What each node's sampler measures; its steps are seconds since the start."""

    kind = "nodes"

    def new(self) -> Iterator[Value]:
        for node, paths in node_metrics.every(self.outputs).items():
            for path in paths:
                host = node_metrics.about(path).host or f"node {node}"
                for line in self.lines(path.name):
                    if named := values.of_node(line, host):
                        moment = number(line, "time") or 0.0
                        yield named, max(0, int(moment - self.started)), moment
