"""Which experiments go, and why the others stay: the directory, the rules, and who is asked.

Stricter than records/experiments.py, because what is listed here may be removed: no link is
followed, and a record has to be one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from orchestrator.common import files
from orchestrator.common.errors import OrchestratorError, UsageError
from orchestrator.head.schedulers import queue
from orchestrator.protocol.requests.follow import Living
from orchestrator.protocol.timing import FILE_ANSWER_SECONDS
from orchestrator.records import trust
from orchestrator.records.checkpoint_store import shown
from orchestrator.records.experiment import TRUST, Experiment, JobRecord, Untrusted, read_record
from orchestrator.records.experiments import stamped
from orchestrator.records.outcome import Head

STAMP = re.compile(r"[^.].*_([0-9]{8}_[0-9]{6})", re.DOTALL)
GONE = re.compile(r"\.(.+)\.gone-[0-9a-f]{8}", re.DOTALL)
OVER = ("done", "failed", "stopped", "lost")
PIN, HEAD = ".pin", ".head"


class InTheWay(Exception):
    """The reason why an experiment stays as it is, as a sentence."""


@dataclass(frozen=True)
class Rules:
    """The user's choice; older_than is in seconds."""

    keep: int
    older_than: float = 0.0
    keep_failed: bool = False


@dataclass(frozen=True)
class Entry:
    """One experiment in the directory."""

    name: str
    record: JobRecord
    pinned: bool = False
    identity: tuple[int, int] = (0, 0)
    launched_here: bool = False  # else no machine that its record names is asked

    @property
    def when(self) -> float:
        return stamp(self.name) or 0.0

    @property
    def settled(self) -> bool:
        """Tell whether every node was seen to end: one that did not answer at the start may have
        begun after all."""
        at_start = self.record.verdict is not None and self.record.verdict.kind == "start"
        return self.record.state in ("done", "failed", "stopped") and not at_start


@dataclass(frozen=True)
class Scan:
    """The content of the experiments directory."""

    entries: Sequence[Entry] = ()
    foreign: Mapping[str, str] = field(default_factory=dict)  # name -> why it is none of ours
    hidden: Sequence[str] = ()  # left by prunes that were interrupted


@dataclass(frozen=True)
class Measure:
    """The bytes that deleting a directory would free, and the first obstacle to that."""

    size: int = 0
    obstacle: str = ""


@dataclass(frozen=True)
class Plan:
    """Says what is to be removed, and why the rest stays; the newest entries come first."""

    directory: Path
    decided: Sequence[tuple[Entry, str | None]] = ()  # None: it goes
    scan: Scan = field(default_factory=Scan)
    busy: Collection[str] = ()  # names of those that the rules select, and that cannot go now
    measured: Mapping[str, Measure] = field(default_factory=dict)
    unreached: Mapping[str, str] = field(default_factory=dict)  # node -> why
    on_nodes: bool = False

    @property
    def going(self) -> list[Entry]:
        return [entry for entry, why in self.decided if why is None]


# -- the directory ----------------------------------------------------------------------------


def stamp(name: str) -> float | None:
    """Return the time at the end of a name; copying a directory changes its times on the disk."""
    match = STAMP.fullmatch(name)
    return stamped(match[1]) if match else None


def scan(root: int, *, trusted: bool = False) -> Scan:
    """Read all entries of the experiments directory, without following a link."""
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
    return Scan(entries, foreign, hidden)


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
            status, record = (
                os.fstat(directory),
                read_record(directory, Path(name), trusted=trusted),
            )
            launched = trusted or trust.signature(directory, record.orders) is not None
            status = os.fstat(directory)
            identity = (status.st_dev, status.st_ino)
            return Entry(name, record, pinned(directory), identity, launched)
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
    """Tell whether this experiment must never be removed."""
    try:
        os.stat(PIN, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def pin(root: int, name: str, *, wanted: bool) -> None:
    """Protect an experiment from being removed, or make it again like any other."""
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


def in_use(root: int, name: str) -> str:
    """Return which head follows the job now, or nothing; no file is created or kept open."""
    try:
        with files.opened(name, root) as directory, lock_of_head(directory):
            return ""
    except InTheWay as reason:
        return str(reason)
    except OSError:
        return ""


def measure(root: int, name: str, path: os.PathLike[str]) -> Measure:
    """Measure an experiment without changing it; a file with several names counts once."""
    size, linked, obstacles = 0, set[int](), list[str]()

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # another prune was faster
            obstacles.append(f"{shown(error.filename)}: {error.strerror}")

    try:
        for where, inner, names, directory in os.fwalk(name, onerror=note, dir_fd=root):
            there = os.fstat(directory).st_nlink  # none: another prune has just deleted it
            writable = os.access(".", os.W_OK | os.X_OK, dir_fd=directory, effective_ids=True)
            if (inner or names) and there and not writable:
                obstacles.append(f"{shown(os.path.relpath(where, name))} is read-only for us")
            for entry in (*inner, *names):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(entry, dir_fd=directory, follow_symlinks=False)
                    size += 0 if status.st_ino in linked else status.st_blocks * 512
                    if status.st_nlink > 1:
                        linked.add(status.st_ino)
    except RecursionError:
        obstacles.insert(0, "its directories are nested too deeply")
    except OSError as error:
        note(error)
    for point in files.mounts_below(path):
        obstacles.insert(0, f"{shown(point)} is mounted there: what it holds is not ours to delete")
    return Measure(size, next(iter(obstacles), ""))


# -- the rules --------------------------------------------------------------------------------


def choose(entries: Sequence[Entry], now: float, rules: Rules) -> list[tuple[Entry, str | None]]:
    """Return every entry, the newest first, with the reason to keep it; None: it goes.

    The newest `keep` are counted over all experiments, whatever became of them.
    """
    ordered = sorted(entries, key=lambda entry: (entry.when, entry.name), reverse=True)
    return [(entry, reason(entry, at, now, rules)) for at, entry in enumerate(ordered)]


def reason(entry: Entry, position: int, now: float, rules: Rules) -> str | None:
    if position < rules.keep:
        return "it is the newest" if rules.keep == 1 else f"among the newest {rules.keep}"
    if now - entry.when < rules.older_than:
        return "it is not old enough"
    if entry.pinned:
        return "pinned"
    state = entry.record.state
    if rules.keep_failed and state not in ("done", "stopped"):
        return state if state in OVER else "how it ended is not known: orchestrator attach"
    return None


def decide(
    root: int,
    directory: Path,
    rules: Rules,
    *,
    trusted: bool = False,
    ssh_config: Path | None = None,
    on_nodes: bool = False,
) -> Plan:
    """Choose by the rules, and ask about those that would go: what runs or is in use stays."""
    content = scan(root, trusted=trusted)
    chosen = choose(content.entries, time.time(), rules)
    going = [entry for entry, why in chosen if why is None]
    busy = {
        entry.name: in_use(root, entry.name)
        or in_queue(directory / entry.name, entry)
        or unasked(entry, on_nodes=on_nodes)
        for entry in going
    }
    to_ask = [
        entry.record
        for entry in going
        if not busy[entry.name] and (on_nodes or not entry.settled)
        if entry.launched_here and not entry.record.scheduled
    ]
    living, silent = ask_living(to_ask, ssh_config) if to_ask else (set(), {})
    busy = {e.name: why for e in going if (why := busy[e.name] or runs(e.record, living, silent))}
    decided = [(entry, why or busy.get(entry.name)) for entry, why in chosen]
    names = [entry.name for entry, why in decided if why is None] + [*content.hidden]
    measured = {name: measure(root, name, directory / name) for name in names}
    unreached = {
        node.name: silent[run]
        for record in to_ask
        for node in record.nodes
        if on_nodes and (run := (record.job, node.index)) in silent
    }
    return Plan(directory, decided, content, busy, measured, unreached, on_nodes)


def ask_living(
    records: Sequence[JobRecord], ssh_config: Path | None
) -> tuple[Collection[tuple[str, int]], Mapping[tuple[str, int], str]]:
    """Return the runs of these jobs that live, and why nobody could be asked about others."""
    from orchestrator.head.prune import nodes  # paramiko takes 0.1 s

    answers, silent = nodes.ask(Living, records, ssh_config, FILE_ANSWER_SECONDS)
    return {run for answer in answers for run in answer.living}, silent


def in_queue(path: Path, entry: Entry) -> str:
    """Return why a job of Slurm's must be taken for running, or nothing."""
    record = entry.record
    job = None if entry.settled else record.slurm_job or Experiment(path).slurm_job()
    if job is None:
        return ""
    try:
        queued = queue.find(job)
    except OrchestratorError as error:
        return f"its record says {record.state}, and Slurm cannot be asked: {error.what}"
    return "" if queued.over else f"it is Slurm's job {job}: {queued}"


def unasked(entry: Entry, *, on_nodes: bool) -> str:
    """Say why the nodes of a job are not asked whether it still runs, where they would have to."""
    if entry.launched_here or entry.record.scheduled:
        return ""
    if entry.record.state in OVER and not (on_nodes and entry.record.nodes):
        return ""
    return f"this login did not launch it: its nodes are not asked ({TRUST} asks them)"


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
