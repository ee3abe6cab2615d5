"""The directory of a sweep: what it compares, and a journal of its members, which a report reads.

sweep.json is written once. journal.jsonl only grows: a line when a member is started, and a line
when it has ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.head.screen.output import complain_once
from orchestrator.protocol.message import Count, Moment, Nonsense, decode_value, parse_object
from orchestrator.records import experiments

SWEEP, JOURNAL, STOP = "sweep.json", "journal.jsonl", "stop"


@dataclass(frozen=True)
class About:
    """The metric of a sweep, and the number of its members, for a report."""

    metric: str = ""
    # "least" or "most".
    best: str = ""
    count: Count = 0


@dataclass(frozen=True)
class MemberState:
    """A line of the journal: a member was started, or it has ended."""

    member: Count
    words: str = ""
    state: str = "not over"
    values: dict[str, str] = field(default_factory=dict)
    # The value of the sweep's metric.
    value: float | None = None
    seconds: Moment = 0.0
    experiment: str = ""
    problem: str = ""
    # The time at which the line was written.
    at: Moment = 0.0

    @property
    def is_known(self) -> bool:
        """Return True if it has a value that others can be compared with."""
        return self.state == "done" and self.value is not None and math.isfinite(self.value)


@dataclass(frozen=True)
class Journal:
    """A sweep on the disk."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def add(self, state: MemberState) -> None:
        """Append a line. A full disk costs the report this line, and the sweep nothing."""
        line = json.dumps(asdict(replace(state, at=round(time.time(), 3)))).encode() + b"\n"
        with contextlib.suppress(OSError):
            if files.add_lines(self.path / JOURNAL, line):
                return
        complain_once(f"{self.path / JOURNAL} cannot be written: the report lacks members")

    def read(self) -> Iterator[MemberState]:
        """Yield the lines so far."""
        with contextlib.suppress(FileNotFoundError), files.open_plain(self.path / JOURNAL) as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield decoded(MemberState, line, self.path / JOURNAL)

    def describe(self) -> About:
        return decoded(About, files.read_plain(self.path / SWEEP), self.path / SWEEP)

    def ask_to_stop(self) -> None:
        """Create the file that makes the sweep's process stop, on any machine."""
        files.replace_file(self.path / STOP, "")

    @property
    def stop_is_asked(self) -> bool:
        return (self.path / STOP).exists()


T = TypeVar("T")


def decoded(kind: type[T], data: bytes, path: Path) -> T:
    try:
        return decode_value(kind, parse_object(data), newer=True)
    except Nonsense as error:
        raise UsageError(f"{path} was changed: {error}") from None


def create_journal(root: Path, name: str, about: About) -> Journal:
    """Create the directory of a new sweep in the directory of experiments."""
    experiment = experiments.create_experiment(root, name)
    for inner in (experiment.logs, experiment.path / "outputs"):
        inner.rmdir()
    experiment.write(SWEEP, json.dumps(asdict(about)) + "\n")
    return Journal(experiment.path)


def find_journal(root: Path, name: str) -> Journal | None:
    """Return the sweep of this name or directory, if there is one."""
    for path in (root / name, Path(name)):
        with contextlib.suppress(OSError):
            if (path / SWEEP).is_file():
                return Journal(path.absolute())
    return None
