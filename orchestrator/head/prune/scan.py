"""What lies in the experiments directory: experiments of ours, and what is none, and why.

Stricter than experiment.every(), because what is found here may be removed: nothing is followed,
and a record has to be one. prune.py calls it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.head.prune.remove import DIRECTORY, GONE, Measure, pinned
from orchestrator.records.experiment import JobRecord

STAMP = re.compile(r"[^.].*_([0-9]{8}_[0-9]{6})", re.DOTALL)
LARGEST_RECORD = 64 << 20
OVER = ("done", "failed", "stopped", "lost")


@dataclass(frozen=True)
class Found:
    """One entry of the experiments directory; without a record it is not an experiment of ours."""

    name: str
    record: JobRecord | None = None
    foreign: str = ""  # why it is none
    pinned: bool = False
    busy: str = ""  # why it cannot go now: it runs, it is in use, that cannot be known
    identity: tuple[int, int] = (0, 0)

    @property
    def when(self) -> float:
        return stamp(self.name) or 0.0


@dataclass
class Plan:
    """What is to be done, and what came of it."""

    directory: Path
    decided: list[tuple[Found, str | None]]
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
    def going(self) -> list[Found]:
        return [one for one, why in self.decided if why is None]


def settled(record: JobRecord) -> bool:
    """Was every node seen to end? One that did not answer at the start may have begun after all."""
    at_start = isinstance(record.verdict, dict) and record.verdict.get("kind") == "start"
    return record.state in ("done", "failed", "stopped") and not at_start


def stamp(name: str) -> float | None:
    """The time that a name ends with. It counts, and no time of the disk: copying changes those."""
    found = STAMP.fullmatch(name)
    try:
        return time.mktime(time.strptime(found[1], "%Y%m%d_%H%M%S")) if found else None
    except (ValueError, OverflowError):
        return None


def scan(root: int) -> tuple[list[Found], list[str]]:
    """Everything in the experiments directory, and what interrupted prunes left there."""
    names = sorted(os.listdir(root))
    hidden = [name for name in names if GONE.fullmatch(name) and is_directory(root, name)]
    return [look(root, name) for name in names if name not in hidden], hidden


def is_directory(root: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open(name, DIRECTORY, dir_fd=root))
        return True
    return False


def look(root: int, name: str) -> Found:
    try:
        if stamp(name) is None:
            return Found(name, foreign="its name does not end with a time")
        directory = os.open(name, DIRECTORY, dir_fd=root)
    except NotADirectoryError:
        link = stat.S_ISLNK(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
        return Found(name, foreign="a symbolic link" if link else "not a directory")
    except OSError as error:
        return Found(name, foreign=f"it cannot be read: {error.strerror}")
    try:
        status = os.fstat(directory)
        record = read_record(directory)
        own = (status.st_dev, status.st_ino)
        return Found(name, record, pinned=pinned(directory), identity=own)
    except FileNotFoundError:
        return Found(name, foreign="it has no job.json")
    except OSError as error:
        return Found(name, foreign=f"its job.json cannot be read: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Found(name, foreign="its job.json is not the record of a job")
    finally:
        os.close(directory)


def read_record(directory: int) -> JobRecord:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open("job.json", flags, dir_fd=directory), "rb") as file:
        record = JobRecord.from_json(json.loads(file.read(LARGEST_RECORD)))
    texts = [record.job, record.state, *(node.host for node in record.nodes)]
    texts += [node.name for node in record.nodes] + [node.python for node in record.nodes]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("not the words of a record")
    if not all(type(node.index) is int for node in record.nodes):
        raise ValueError("not the nodes of a record")
    return record
