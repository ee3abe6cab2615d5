"""Which experiments go, and why the others stay: the directory, the rules, and what still runs.

Stricter than records/experiments.py, because what is listed here may be removed: no link is
followed, and a record has to be one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.protocol.requests.follow import Living
from orchestrator.protocol.timing import FILE_ANSWER_SECONDS
from orchestrator.records import trust
from orchestrator.records.checkpoint_store import shown
from orchestrator.records.experiment import TRUST, JobRecord, Untrusted, read_record
from orchestrator.records.experiments import stamped
from orchestrator.records.outcome import Head

STAMP = re.compile(r"[^.].*_([0-9]{8}_[0-9]{6})", re.DOTALL)
GONE = re.compile(r"\.(.+)\.gone-[0-9a-f]{8}", re.DOTALL)
OVER = ("done", "failed", "stopped", "lost")
PIN, HEAD = ".pin", ".head"
SELECTED, REMOVED, KEPT, FAILED = "would be removed", "removed", "kept", "failed"


class InTheWay(Exception):
    """The reason why an experiment stays as it is, as a sentence."""


@dataclass
class Removable:
    """A directory that may go: its size, what becomes of it, and why."""

    name: str
    size: int = 0
    action: str = SELECTED
    reason: str = ""

    def stays(self, reason: str) -> None:
        self.action, self.reason = KEPT, reason


@dataclass
class Entry(Removable):
    """One experiment in the directory."""

    record: JobRecord = JobRecord("", "", "", [], [], 0.0)  # noqa: RUF009  it is frozen
    pinned: bool = False
    identity: tuple[int, int] = (0, 0)
    launched_here: bool = False  # else no machine that its record names is asked
    busy: bool = False  # the rules select it, and it cannot go now

    @property
    def when(self) -> float:
        return stamp(self.name) or 0.0

    @property
    def settled(self) -> bool:
        """Return True if every node was seen to end.

        One that did not answer at the start may have begun after all.
        """
        at_start = self.record.verdict is not None and self.record.verdict.kind == "start"
        return self.record.state in ("done", "failed", "stopped") and not at_start


# -- the directory ----------------------------------------------------------------------------


def stamp(name: str) -> float | None:
    """Return the time at the end of a name; copying a directory changes its times on the disk."""
    match = STAMP.fullmatch(name)
    return stamped(match[1]) if match else None


def scan(root: int, *, trusted: bool = False) -> tuple[list[Entry], dict[str, str], list[str]]:
    """Return the experiments, the newest first; why other names are none; interrupted removals."""
    entries, foreign, hidden = [], {}, []
    for name in sorted(os.listdir(root)):
        if GONE.fullmatch(name) and is_directory(root, name):
            hidden.append(name)
            continue
        entry = read(root, name, trusted=trusted)
        if isinstance(entry, Entry):
            entries.append(entry)
        else:
            foreign[name] = entry
    entries.sort(key=lambda entry: (entry.when, entry.name), reverse=True)
    return entries, foreign, hidden


def is_directory(root: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
    return False


def read(root: int, name: str, *, trusted: bool) -> Entry | str:
    """Return one entry, or the reason why it is no experiment of ours."""
    if stamp(name) is None:
        return "its name does not end with a time"
    try:
        with files.opened(name, root) as directory:
            record = read_record(directory, Path(name), trusted=trusted)
            launched = trusted or trust.signature(directory, record.orders) is not None
            status = os.fstat(directory)
            return Entry(
                name,
                record=record,
                pinned=pinned(directory),
                identity=(status.st_dev, status.st_ino),
                launched_here=launched,
            )
    except Untrusted as error:
        return f"it {error.problem}, or its record ({TRUST})"
    except FileNotFoundError:
        return "it has no job.json"
    except NotADirectoryError:
        link = stat.S_ISLNK(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
        return "a symbolic link" if link else "not a directory"
    except OSError as error:
        what = "it" if error.filename == name else "its job.json"
        return f"{what} cannot be read: {error.strerror}"
    except (ValueError, UsageError):
        return "its job.json is not the record of a job"


def pinned(directory: int) -> bool:
    """Return True if this experiment must never be removed."""
    try:
        os.stat(PIN, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def pin(root: int, name: str, *, wanted: bool) -> None:
    """Protect an experiment from being removed, or lift that."""
    with files.opened(name, root) as directory:
        if wanted:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(PIN, flags, files.PRIVATE, dir_fd=directory))
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(PIN, dir_fd=directory)


@contextlib.contextmanager
def lock_of_head(directory: int, create: int = 0) -> Iterator[BinaryIO]:
    """Hold the lock that a head holds as long as it follows the job: Experiment.lock()."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | create
    with os.fdopen(os.open(HEAD, flags, files.PRIVATE, dir_fd=directory), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InTheWay(f"it is in use by {Head.read(file.read())}") from None
        yield file


def measure(root: int, one: Removable, path: os.PathLike[str]) -> None:
    """Note the bytes that deleting a directory would free, and what would prevent that."""
    linked = set[int]()
    obstacle = ""
    for where, inner, names, directory in os.fwalk(one.name, dir_fd=root):
        if (inner or names) and not os.access(
            ".", os.W_OK | os.X_OK, dir_fd=directory, effective_ids=True
        ):
            obstacle = obstacle or f"{shown(os.path.relpath(where, one.name))} is read-only for us"
        for entry in (*inner, *names):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(entry, dir_fd=directory, follow_symlinks=False)
                one.size += 0 if status.st_ino in linked else status.st_blocks * 512
                if status.st_nlink > 1:
                    linked.add(status.st_ino)
    if obstacle := mounted(path) or obstacle:
        one.action, one.reason = FAILED, obstacle


def mounted(path: os.PathLike[str]) -> str:
    """Return which mount is in a directory, as an obstacle; nothing where there is none."""
    points = files.mounts_below(path)
    return f"{shown(points[0])} is mounted there: what it holds is not ours" if points else ""


# -- the rules --------------------------------------------------------------------------------


def choose(
    entries: Sequence[Entry], now: float, keep: int, older_than: float, *, keep_failed: bool
) -> None:
    """Note which stay by the rules. The newest are counted over all, whatever became of them."""
    for position, entry in enumerate(entries):
        state = entry.record.state
        if position < keep:
            entry.stays("it is the newest" if keep == 1 else f"among the newest {keep}")
        elif now - entry.when < older_than:
            entry.stays("it is not old enough")
        elif entry.pinned:
            entry.stays("pinned")
        elif keep_failed and state not in ("done", "stopped"):
            unknown = "how it ended is not known: orchestrator attach"
            entry.stays(state if state in OVER else unknown)


def keep_busy(
    root: int, entries: Sequence[Entry], ssh_config: Path | None, *, on_nodes: bool
) -> dict[str, str]:
    """Note which stay because they run or are in use; return node -> why it cannot be asked."""
    going = [entry for entry in entries if entry.action == SELECTED]
    why = {
        entry.name: in_use(root, entry.name) or unknown(entry, on_nodes=on_nodes) for entry in going
    }
    records = [
        entry.record
        for entry in going
        if not why[entry.name] and (on_nodes or not entry.settled) and not entry.record.scheduled
    ]
    living: set[tuple[str, int]] = set()
    silent: dict[tuple[str, int], str] = {}
    if records:
        from orchestrator.head.prune import nodes  # paramiko takes 0.1 s

        answers, silent = nodes.ask(Living, records, ssh_config, FILE_ANSWER_SECONDS)
        living = {run for answer in answers for run in answer.living}
    for entry in going:
        if reason := why[entry.name] or runs(entry.record, living, silent):
            entry.stays(reason)
            entry.busy = True
    every = [(node, (record.job, node.index)) for record in records for node in record.nodes]
    return {node.name: silent[run] for node, run in every if on_nodes and run in silent}


def unknown(entry: Entry, *, on_nodes: bool) -> str:
    """Return why it cannot be found out whether a job still runs, where that is needed."""
    record, over = entry.record, entry.record.state in OVER
    if record.scheduled:
        job = record.slurm_job
        return "" if over else f"its record says {record.state}, as Slurm's job {job}"
    if entry.launched_here or (over and not (on_nodes and record.nodes)):
        return ""
    return f"this login did not launch it: its nodes are not asked ({TRUST} asks them)"


def in_use(root: int, name: str) -> str:
    """Return which head follows the job now, or nothing; no file is created or kept open."""
    try:
        with files.opened(name, root) as directory, lock_of_head(directory):
            return ""
    except InTheWay as reason:
        return str(reason)
    except OSError:
        return ""


def runs(
    record: JobRecord, living: Collection[tuple[str, int]], silent: Mapping[tuple[str, int], str]
) -> str:
    """Return why a job must be taken for running, or nothing; one recorded as over need not be."""
    for node in record.nodes:
        if (record.job, node.index) in living:
            return f"it runs, on node {node.index} ({node.name})"
    for node in record.nodes:
        if record.state not in OVER and (why := silent.get((record.job, node.index))):
            return f"its record says {record.state}, and {node.name} cannot be asked: {why}"
    return ""
