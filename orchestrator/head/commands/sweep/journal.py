"""The directory of a sweep: what it is, who leads it, and a journal of what became of its members.

sweep.json is written once. journal.jsonl only grows, a line for each event, each on the disk before
the next step is taken. slots/ has a file for each member that is given out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.errors import UsageError, nearest
from orchestrator.common.permissions import others
from orchestrator.head.commands.sweep.slot import Slot
from orchestrator.protocol.message import Count, Moment, Nonsense, decode, parse
from orchestrator.records import experiments, trust
from orchestrator.records.experiment import TRUST, Experiment

SLOT = re.compile(r"[0-9]{1,9}")
SWEEP, JOURNAL, SLOTS = "sweep.json", "journal.jsonl", "slots"


@dataclass(frozen=True)
class Typed:
    """Holds what was typed of the sweep itself."""

    variables: tuple[str, ...] = ()  # NAME=VALUES
    random: int | None = None
    optuna: int | None = None
    array: str = ""
    way: str = "args"
    jobs: int | None = None
    metric: str = ""
    best: str = ""  # least or most


@dataclass(frozen=True)
class About:
    """Holds what its file says of a sweep."""

    words: tuple[str, ...] = ()
    terms: Typed = field(default_factory=Typed)
    directory: str = ""
    restarts: int = 0
    members: tuple[tuple[dict[str, str], tuple[str, ...]], ...] | None = None


@dataclass(frozen=True)
class Line:
    """One event of the journal: a member was given out, or its end has a state."""

    member: Count
    at: Moment = 0.0
    given: str = ""
    words: str = ""
    state: str = ""
    values: dict[str, str] = field(default_factory=dict)
    value: float | None = None  # of the metric
    seconds: Moment = 0.0
    experiment: str = ""
    problem: str = ""


@dataclass
class Journal:
    """A sweep on the disk."""

    path: Path
    size: int = 0  # of the lines that are whole
    unwritten: list[dict[str, Any]] = field(default_factory=list)  # while the disk is full

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def file(self) -> Path:
        return self.path / JOURNAL

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """Be the one process that leads the sweep."""
        experiment = Experiment(self.path)
        holder = experiment.lock()
        if holder is not None:
            raise UsageError(
                f"{self.name} is led by {holder}",
                f"end that process, or stop the sweep: orchestrator stop {self.name}",
            )
        try:
            yield
        finally:
            experiment.unlock()

    def add(self, **event: Any) -> bool:
        """Write an event down, and those that the disk had no room for; tell whether it has."""
        self.unwritten.append({**event, "at": round(time.time(), 3)})
        return self.write()

    def write(self) -> bool:
        if not self.unwritten:
            return True
        lines = b"".join(json.dumps(event).encode() + b"\n" for event in self.unwritten)
        try:
            descriptor = files.open_to_append(self.file)
        except OSError:
            return False
        try:
            os.ftruncate(descriptor, self.size)  # the end of a line that did not fit
            whole = files.append_lines(descriptor, lines) == len(lines)
            os.fsync(descriptor)
        except OSError:
            whole = False
        finally:
            os.close(descriptor)
        if whole:
            self.size += len(lines)
            self.unwritten = []
        return whole

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the events that were written as a whole; what comes after them goes."""
        self.size = 0
        with contextlib.suppress(FileNotFoundError), self.file.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    event = parse(line)
                    decode(Line, event, newer=True)
                except Nonsense as error:
                    raise UsageError(f"{self.file} was changed: {error}") from None
                self.size += len(line)
                yield event

    def slot(self, number: int) -> Slot:
        return Slot(self.path / SLOTS / str(number))

    def slots(self) -> list[Slot]:
        """Return those that were given out before, in order."""
        with contextlib.suppress(FileNotFoundError):
            found = [path for path in (self.path / SLOTS).iterdir() if SLOT.fullmatch(path.name)]
            return sorted(map(Slot, found), key=lambda slot: slot.number)
        return []

    def data(self) -> dict[str, Any]:
        """Return what its file has, as it was signed."""
        try:
            return parse((self.path / SWEEP).read_bytes())
        except Nonsense as error:
            raise UsageError(f"{self.path / SWEEP} was changed: {error}") from None

    def describe(self) -> About:
        try:
            return decode(About, self.data(), newer=True)
        except Nonsense as error:
            raise UsageError(f"{self.path / SWEEP} was changed: {error}") from None


def create(root: Path, name: str, data: dict[str, Any]) -> Journal:
    """Make the directory of a new sweep, among those of the experiments."""
    experiment = experiments.create(root, name)
    journal = Journal(experiment.path)
    try:
        for inner in (experiment.logs, experiment.path / "outputs"):
            inner.rmdir()
        files.make_private(journal.path / SLOTS)
        text = json.dumps(data)
        trust.sign(journal.path, json.loads(text))  # as it will be read
        experiment.write(SWEEP, text + "\n")
    except OSError as error:
        raise UsageError(
            f"{journal.path} cannot be written: {error.strerror}; nothing was started",
            "free some space or name another directory with --experiments DIR",
        ) from error
    return journal


def find(root: Path, name: str, *, trusted: bool = False) -> Journal:
    """Find a sweep by its name or directory; `trusted`: whoever began it.

    One that came with a repository is ours by its owner: what it says to run, this login never did.
    """
    if journal := known_as(root, name):
        for path in (journal.path, journal.path / SWEEP):
            if problem := others(path.stat()):
                raise UsageError(
                    f"{path} {problem}, and a sweep could name any program to run",
                    f"chmod -R go-w {journal.path}",
                )
        with files.opened(journal.path) as directory:
            signed = trust.signature(directory, journal.data()) is not None
        if not signed and not trusted:
            raise UsageError(
                f"{journal.path} was not begun by this login: the machines and programs that it"
                " names are not used",
                f"begin it anew: orchestrator sweep; `orchestrator stop` ends it with {TRUST}",
            )
        return journal
    known = sorted(path.parent.name for path in root.glob(f"*/{SWEEP}"))
    near = nearest(name, known)
    raise UsageError(
        f"there is no sweep {name!r} in {root.absolute()}{near}",
        f"the newest is {max(known, key=lambda one: one[-15:])}" if known else "",
    )


def known_as(root: Path, name: str) -> Journal | None:
    """Return the sweep of this name or directory, if there is one."""
    for path in (root / name, Path(name)):
        with contextlib.suppress(OSError):
            if (path / SWEEP).is_file():
                return Journal(path.absolute())
    return None
