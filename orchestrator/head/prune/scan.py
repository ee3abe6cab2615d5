"""List the experiments directory: which entries are ours, and why the others are not.

Stricter than experiment.every(), because what is listed here may be removed: no link is followed,
and a record has to be one.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.head.prune.remove import Measure, pinned
from orchestrator.records import trust
from orchestrator.records.experiment import TRUST, JobRecord, Untrusted, read_record
from orchestrator.records.experiments import stamped

STAMP = re.compile(r"[^.].*_([0-9]{8}_[0-9]{6})", re.DOTALL)
GONE = re.compile(r"\.(.+)\.gone-[0-9a-f]{8}", re.DOTALL)
OVER = ("done", "failed", "stopped", "lost")


@dataclass(frozen=True)
class ScannedExperiment:
    """One entry of the experiments directory; without a record it is not an experiment of ours."""

    name: str
    record: JobRecord | None = None
    foreign: str = ""  # why it is not one
    pinned: bool = False
    busy: str = ""  # why it cannot go now: it runs, it is in use, that cannot be known
    identity: tuple[int, int] = (0, 0)
    launched_here: bool = False  # else no machine that its record names is asked

    @property
    def when(self) -> float:
        return stamp(self.name) or 0.0


@dataclass
class PrunePlan:
    """The experiments to remove, and the outcome."""

    directory: Path
    decided: list[tuple[ScannedExperiment, str | None]]
    hidden: list[str]
    on_nodes: bool = False
    measured: dict[str, Measure] = field(default_factory=dict)
    unreached: dict[str, str] = field(default_factory=dict)  # node -> why
    removed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    spared: dict[str, str] = field(default_factory=dict)  # taken up or pinned meanwhile
    freed: int = 0
    freed_on_nodes: int = 0

    @property
    def going(self) -> list[ScannedExperiment]:
        return [experiment for experiment, why in self.decided if why is None]

    @property
    def ours(self) -> list[tuple[ScannedExperiment, str | None]]:
        return [(entry, why) for entry, why in self.decided if entry.record is not None]


def settled(record: JobRecord) -> bool:
    """Tell whether every node was seen to end.

    One that did not answer at the start may have begun after all.
    """
    at_start = isinstance(record.verdict, dict) and record.verdict.get("kind") == "start"
    return record.state in ("done", "failed", "stopped") and not at_start


def stamp(name: str) -> float | None:
    """Return the time at the end of a name; copying a directory changes its times on the disk."""
    match = STAMP.fullmatch(name)
    return stamped(match[1]) if match else None


def scan(root: int, *, trusted: bool = False) -> tuple[list[ScannedExperiment], list[str]]:
    """Return all entries of the experiments directory, and what interrupted prunes left hidden."""
    names = sorted(os.listdir(root))
    hidden = [name for name in names if GONE.fullmatch(name) and is_directory(root, name)]
    return [look(root, name, trusted=trusted) for name in names if name not in hidden], hidden


def is_directory(root: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
    return False


def look(root: int, name: str, *, trusted: bool) -> ScannedExperiment:
    """Read one entry without following a link."""

    def foreign(why: str) -> ScannedExperiment:
        return ScannedExperiment(name, foreign=why)

    if stamp(name) is None:
        return foreign("its name does not end with a time")
    try:
        with files.opened(name, root) as directory:
            status = os.fstat(directory)
            own = (status.st_dev, status.st_ino)
            record = read(directory, name, trusted=trusted)
            launched = trusted or trust.signature(directory, record) is not None
            return ScannedExperiment(
                name, record, pinned=pinned(directory), identity=own, launched_here=launched
            )
    except NotADirectoryError:
        link = stat.S_ISLNK(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
        return foreign("a symbolic link" if link else "not a directory")
    except Unreadable as error:
        return foreign(str(error))
    except OSError as error:
        return foreign(f"it cannot be read: {error.strerror}")


class Unreadable(Exception):
    """The reason why a directory has no record of a job."""


def read(directory: int, name: str, *, trusted: bool) -> JobRecord:
    try:
        return read_record(directory, Path(name), trusted=trusted)
    except Untrusted as error:
        raise Unreadable(f"it {error.problem}, or its record ({TRUST})") from None
    except FileNotFoundError:
        raise Unreadable("it has no job.json") from None
    except OSError as error:
        raise Unreadable(f"its job.json cannot be read: {error.strerror}") from error
    except (ValueError, UsageError) as error:
        raise Unreadable("its job.json is not the record of a job") from error
