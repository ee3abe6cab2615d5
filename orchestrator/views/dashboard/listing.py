"""Reads all experiments of a directory: what each is, and how far. One reader for all clients."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.head.status import label
from orchestrator.records import experiments, goodput
from orchestrator.records.experiment import RECORD, Experiment, JobRecord
from orchestrator.records.metrics import progress
from orchestrator.records.outcome import Verdict
from orchestrator.views.report import settings

MOST = 500  # the newest; older ones are found by the commands
MOST_KEYS = 24  # settings that differ, which a reader may choose as columns
UNREADABLE = "damaged"

Stamp = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Row(progress.Progress):
    """One experiment in the list."""

    name: str
    state: str
    started: float = 0.0
    ended: float | None = None
    nodes: int = 0
    ranks: int = 0
    attempt: int = 1
    cause: str = ""  # of a failure, in a line
    training: float | None = None  # the part of its time that was training
    note: str = ""
    tags: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)  # those that differ within the list


@dataclass
class _Kept:
    stamp: Stamp
    record: JobRecord
    steps: int | None
    settings: dict[str, str]
    row: Row | None = None  # of one that is over


@dataclass
class Listing:
    """The experiments of one directory. Records that did not change are not read again."""

    root: Path
    trusted: bool = False
    kept: dict[str, _Kept] = field(default_factory=dict)
    differing: list[str] | None = None  # the settings that do, until others are known

    def rows(self) -> list[Row]:
        """Return the newest experiments, the newest first."""
        found = experiments.every(self.root, trusted=self.trusted)[: -MOST - 1 : -1]
        names = {each.name for each in found}
        for gone in self.kept.keys() - names:
            del self.kept[gone]
            self.differing = None
        rows = [self.row(each) for each in found]
        known = {name: kept.settings for name, kept in self.kept.items()}
        if self.differing is None:
            of_rows = [known[row.name] for row in rows if row.name in known]
            self.differing = settings.differing(of_rows, MOST_KEYS)
        return [
            replace(
                row,
                settings={
                    name: value
                    for name in self.differing
                    if (value := known.get(row.name, {}).get(name)) is not None
                },
            )
            for row in rows
        ]

    def find(self, name: str) -> Experiment | None:
        """Return an experiment by its name in the list; no path leads out of the directory."""
        every = experiments.every(self.root, trusted=self.trusted)
        return next((each for each in every if each.name == name), None)

    def row(self, each: Experiment) -> Row:
        path = each.path
        try:
            stamp = stamp_of(path / RECORD)
            kept = self.kept.get(each.name)
            if kept is None or kept.stamp != stamp:
                record = each.read_record()
                own = kept.settings if kept is not None else {}
                if not own:  # they stand from the launch on; the record changes with each event
                    own = settings.of(each, record)
                    self.differing = None
                steps = progress.all_steps(path, record)
                kept = self.kept[each.name] = _Kept(stamp, slim(record), steps, own)
        except (OSError, UsageError) as error:
            what = error.what if isinstance(error, UsageError) else error.strerror or "unreadable"
            return Row(name=each.name, state=UNREADABLE, cause=what)
        if kept.row is None or not kept.record.over:
            try:
                kept.row = row_of(path, kept.record, kept.steps)
            except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
                # One that makes no sense is that one's trouble, and not the whole list's.
                kept.row = Row(
                    name=each.name, state=UNREADABLE, cause=f"unreadable ({type(error).__name__})"
                )
        said = label.of(each, kept.record)  # anybody may change it, also of one that is over
        return replace(kept.row, note=said.note, tags=said.tags)


def slim(record: JobRecord) -> JobRecord:
    """Leave out what the list does not show and may be large: every rank, every traceback."""
    nodes = [replace(node, ranks={}) for node in record.nodes]
    cause = record.verdict and Verdict(
        title=record.verdict.title[:300], message=record.verdict.message[:300]
    )
    return replace(record, nodes=nodes, verdict=cause, command=[], receipts={})


def row_of(path: Path, record: JobRecord, steps: int | None) -> Row:
    ranks = sum(node.nproc for node in record.nodes)
    known = record.goodput or goodput.of(record, path, record.ended or time.time())
    whole = sum(known.values())
    training = known.get("training", 0.0) / whole if whole else 0.0
    cause = record.verdict if record.state in ("failed", "lost") else None
    how_far, _ = progress.of(path, record, steps)
    return Row(
        name=path.name,
        state=record.state,
        started=record.started,
        ended=record.ended,
        nodes=len(record.nodes),
        ranks=ranks,
        attempt=record.attempt,
        cause=f"{cause.title}: {cause.message}".splitlines()[0] if cause else "",
        training=training if 0 < training <= 1 else None,
        **vars(how_far),
    )


def stamp_of(path: Path) -> Stamp:
    status = path.lstat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def fingerprint(experiment: Experiment) -> tuple[Any, ...]:
    """Return what changes when the record or a metrics file of an experiment does."""
    try:
        entries = sorted(os.scandir(experiment.path / "outputs"), key=lambda entry: entry.name)
        sizes = [(entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries]
        return stamp_of(experiment.path / RECORD), tuple(sizes)
    except OSError:
        return ()


def is_plain(path: Path) -> bool:
    """Tell whether a log is a file in its directory, and not a link to something else."""
    try:
        with files.opened(path.parent) as directory:
            status = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode)
