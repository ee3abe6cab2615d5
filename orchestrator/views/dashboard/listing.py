"""Reads all experiments of a directory: what each is, and how far. One reader for all clients."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.head.status import row, settings
from orchestrator.head.status.row import Row
from orchestrator.records import experiments
from orchestrator.records.experiment import RECORD, Experiment, JobRecord
from orchestrator.records.metrics import progress
from orchestrator.records.outcome import Verdict
from orchestrator.views.tail import Stamp, stamp_of

MOST = 500  # the newest; older ones are found by the commands
MOST_KEYS = 24  # settings that differ, which a reader may choose as columns


@dataclass(frozen=True)
class Listed(Row):
    """One experiment in the list."""

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

    def rows(self) -> list[Listed]:
        """Return the newest experiments, the newest first."""
        found = experiments.every(self.root, trusted=self.trusted)[: -MOST - 1 : -1]
        names = {each.name for each in found}
        for gone in self.kept.keys() - names:
            del self.kept[gone]
            self.differing = None
        rows = [self.row(each) for each in found]
        known = {name: kept.settings for name, kept in self.kept.items()}
        if self.differing is None:
            of_rows = [known[each.name] for each in rows if each.name in known]
            self.differing = settings.differing(of_rows, MOST_KEYS)
        return [
            Listed(
                **vars(each),
                settings={
                    name: value
                    for name in self.differing
                    if (value := known.get(each.name, {}).get(name)) is not None
                },
            )
            for each in rows
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
            if kept.row is None or not kept.record.over:
                kept.row = row.of(each, kept.record, kept.steps)
        except row.TROUBLE as error:
            return row.damaged(each.name, error)
        return kept.row


def slim(record: JobRecord) -> JobRecord:
    """Leave out what the list does not show and may be large: every rank, every traceback."""
    nodes = [replace(node, ranks={}) for node in record.nodes]
    cause = record.verdict and Verdict(
        title=record.verdict.title[:300], message=record.verdict.message[:300]
    )
    return replace(record, nodes=nodes, verdict=cause, command=[], receipts={})


def fingerprint(experiment: Experiment) -> tuple[Any, ...]:
    """Return what changes when the record or a metrics file of an experiment does."""
    try:
        entries = sorted(os.scandir(experiment.path / "outputs"), key=lambda entry: entry.name)
        sizes = [(entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries]
        return stamp_of(experiment.path / RECORD), tuple(sizes)
    except OSError:
        return ()
