"""Removes experiments, here and on the nodes: each whole or gone, however it is cut short.

Stricter than records/experiments.py, because what is listed here may be removed: a record has to
be one, and all is done by names in directories that are held open, so that no symbolic link is
ever followed. The next prune deletes the hidden directories that an interruption left.

    multinode_20260101_000000                  an experiment
    .multinode_20260101_000000.gone-0123abcd   being deleted
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from orchestrator.common import files
from orchestrator.common.errors import OrchestratorError, UsageError
from orchestrator.config.launch import Where
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import Living, Remove
from orchestrator.protocol.requests.request import Part, Request
from orchestrator.protocol.timing import FILE_ANSWER_SECONDS, FILES_ANSWER_SECONDS
from orchestrator.records import experiments
from orchestrator.records.checkpoint_store import shown_name
from orchestrator.records.experiment import (
    TRUST,
    JobRecord,
    NodeRecord,
    Untrusted,
    is_of_another_login,
)
from orchestrator.records.outcome import Head

if TYPE_CHECKING:
    from orchestrator.head.connect.transport import Transport

A = TypeVar("A", bound=Message)
# The dict is an ordered set of the machine's parts.
Machine = tuple[NodeRecord, "Transport", dict[Part, None]]


STAMP = re.compile(r"[^.].*_([0-9]{8}_[0-9]{6})", re.DOTALL)
GONE = re.compile(r"\.(.+)\.gone-[0-9a-f]{8}", re.DOTALL)
OVER = ("done", "failed", "stopped", "lost")
PIN, HEAD = ".pin", ".head"
SELECTED, REMOVED, KEPT, FAILED = "would be removed", "removed", "kept", "failed"


class NotRemovable(Exception):
    """The reason why an experiment stays as it is, as a sentence."""


@dataclass
class Removable:
    """A directory that may be removed, with its size, the action taken, and the reason."""

    name: str
    size: int = 0
    action: str = SELECTED
    reason: str = ""

    def stays(self, reason: str) -> None:
        self.action, self.reason = KEPT, reason


@dataclass
class PruneEntry(Removable):
    """One experiment in the directory."""

    record: JobRecord = JobRecord("", "", "", [], [], 0.0)
    pinned: bool = False
    identity: tuple[int, int] = (0, 0)
    # If False, no node that the record names is contacted.
    launched_here: bool = False
    # The rules select the experiment, but it is in use.
    busy: bool = False

    @property
    def when(self) -> float:
        return time_in_name(self.name) or 0.0

    @property
    def settled(self) -> bool:
        """Return True if every node was seen to end.

        One that did not answer at the start may have begun after all.
        """
        at_start = self.record.verdict is not None and self.record.verdict.kind == "start"
        return self.record.state in ("done", "failed", "stopped") and not at_start


# -- the directory ----------------------------------------------------------------------------


def time_in_name(name: str) -> float | None:
    """Return the time at the end of a name; copying a directory changes its times on the disk."""
    with contextlib.suppress(ValueError, OverflowError):
        # A name without a time at its end stays as it is, and is no time.
        return time.mktime(time.strptime(STAMP.sub(r"\1", name), "%Y%m%d_%H%M%S"))
    return None


def scan_experiments(
    root: int, where: Where
) -> tuple[list[PruneEntry], dict[str, str], list[Removable]]:
    """Return the experiments, the newest first; why other names are none; interrupted removals."""
    entries, foreign, hidden = [], {}, []
    for each in sorted(os.scandir(root), key=lambda each: each.name):
        if GONE.fullmatch(each.name) and each.is_dir(follow_symlinks=False):
            hidden.append(Removable(each.name))
            continue
        entry = read_entry(root, each.name, where)
        if isinstance(entry, PruneEntry):
            entries.append(entry)
        else:
            foreign[each.name] = entry
    entries.sort(key=lambda entry: (entry.when, entry.name), reverse=True)
    return entries, foreign, hidden


def read_entry(root: int, name: str, where: Where) -> PruneEntry | str:
    """Return one entry, or the reason why it is no experiment of ours."""
    if time_in_name(name) is None:
        return "its name does not end with a time"
    try:
        with files.open_directory(name, root) as directory:
            record, launched = experiments.read_record_in(directory, name, where)
            status = os.fstat(directory)
            return PruneEntry(
                name,
                record=record,
                pinned=is_pinned(directory),
                identity=(status.st_dev, status.st_ino),
                launched_here=launched,
            )
    except Untrusted as error:
        return f"it {error.problem}, or its record ({TRUST})"
    except NotADirectoryError:
        return "a symbolic link, or not a directory"
    except OSError as error:
        what = "it" if error.filename == name else "its job.json"
        return f"{what} cannot be read: {error.strerror}"
    except (ValueError, UsageError):
        return "its job.json is not the record of a job"


def is_pinned(directory: int) -> bool:
    """Return True if this experiment must never be removed."""
    return PIN in os.listdir(directory)


@contextlib.contextmanager
def lock_of_head(directory: int, create: int = 0) -> Iterator[BinaryIO]:
    """Hold the lock that a head holds as long as it follows the job: Experiment.lock()."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | create
    with os.fdopen(os.open(HEAD, flags, files.PRIVATE, dir_fd=directory), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_of_another_login(file.fileno()):
                raise NotRemovable(f"it is in use by {Head.read(file.read())}") from None
        yield file


def measure_directory(root: int, one: Removable, path: os.PathLike[str]) -> None:
    """Set the bytes that deleting a directory would free, and any obstacle to that."""
    obstacle = ""
    for where, inner, names, directory in os.fwalk(one.name, dir_fd=root):
        if (inner or names) and not os.access(
            ".", os.W_OK | os.X_OK, dir_fd=directory, effective_ids=True
        ):
            obstacle = (
                obstacle or f"{shown_name(os.path.relpath(where, one.name))} is read-only for us"
            )
        for entry in (*inner, *names):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(entry, dir_fd=directory, follow_symlinks=False)
                one.size += status.st_blocks * 512
    if obstacle := mount_inside(path) or obstacle:
        one.action, one.reason = FAILED, obstacle


def mount_inside(path: os.PathLike[str]) -> str:
    """Return which mount is in a directory, as an obstacle; nothing where there is none."""
    points = files.mounts_below(path)
    return f"{shown_name(points[0])} is mounted there: what it holds is not ours" if points else ""


# -- the rules --------------------------------------------------------------------------------


def mark_kept(
    entries: Sequence[PruneEntry], now: float, keep: int, older_than: float, *, keep_failed: bool
) -> None:
    """Mark the experiments that the rules keep. `keep` counts the newest in any state."""
    for position, entry in enumerate(entries):
        state = entry.record.state
        if position < keep:
            entry.stays("it is the newest" if keep == 1 else f"among the newest {keep}")
        elif now - entry.when < older_than:
            entry.stays("it is not old enough")
        elif entry.pinned:
            entry.stays("pinned")
        elif keep_failed and state not in ("done", "stopped"):
            entry.stays(
                state if state in OVER else "how it ended is not known: orchestrator attach"
            )


def keep_busy(
    root: int, entries: Sequence[PruneEntry], ssh_config: Path | None, *, on_nodes: bool
) -> dict[str, str]:
    """Mark the experiments that run or are in use; return {node: why it cannot be asked}."""
    going = [entry for entry in entries if entry.action == SELECTED]
    why = {
        entry.name: in_use(root, entry.name) or why_unknown(entry, on_nodes=on_nodes)
        for entry in going
    }
    records = [
        entry.record
        for entry in going
        if not why[entry.name] and (on_nodes or not entry.settled) and not entry.record.scheduled
    ]
    living: set[Part] = set()
    silent: dict[Part, str] = {}
    if records:
        answers, silent = ask_machines(Living, records, ssh_config, FILE_ANSWER_SECONDS)
        living = {run[:2] for answer in answers for run in answer.living}
    for entry in going:
        if reason := why[entry.name] or why_running(entry.record, living, silent):
            entry.stays(reason)
            entry.busy = True
    every = [(node, (record.job, node.part)) for record in records for node in record.nodes]
    return {node.name: silent[part] for node, part in every if on_nodes and part in silent}


def why_unknown(entry: PruneEntry, *, on_nodes: bool) -> str:
    """Return why it cannot be found out whether a job still runs, where that is needed."""
    record, over = entry.record, entry.record.state in OVER
    if record.scheduled:
        job = record.slurm_job
        return "" if over else f"its record says {record.state}, as Slurm's job {job}"
    if entry.launched_here or (over and not (on_nodes and record.nodes)):
        return ""
    return f"this login did not launch it: its nodes are not asked ({TRUST} asks them)"


def in_use(root: int, name: str) -> str:
    """Return a text that names the head that follows the job, or "".

    No file is created or kept open.
    """
    try:
        with files.open_directory(name, root) as directory, lock_of_head(directory):
            return ""
    except NotRemovable as reason:
        return str(reason)
    except OSError:
        return ""


def why_running(record: JobRecord, living: Collection[Part], silent: Mapping[Part, str]) -> str:
    """Return why a job counts as running, or "".

    If a node does not answer, a job recorded as over counts as ended.
    """
    for node in record.nodes:
        if (record.job, node.part) in living:
            return f"it runs, on node {node.index} ({node.name})"
    for node in record.nodes:
        if record.state not in OVER and (why := silent.get((record.job, node.part))):
            return f"its record says {record.state}, and {node.name} cannot be asked: {why}"
    return ""


# -- on their nodes ---------------------------------------------------------------------------


def ask_machines(
    request: type[Request[A]], records: Sequence[JobRecord], ssh_config: Path | None, seconds: float
) -> tuple[list[A], dict[Part, str]]:
    """Send one request to every machine, about its parts of all these jobs.

    Jobs of one list share their machines: 64 nodes are 64 connections, for however many jobs.
    Return the answers, and the parts that could not be asked about, each with the reason.
    """
    # Importing paramiko takes 0.1 s.
    from orchestrator.head.connect import fleet
    from orchestrator.head.connect.reach import ask_node

    machines = by_machine(records, ssh_config)

    def ask_machine(machine: Machine) -> A:
        node, transport, parts = machine
        return ask_node(transport, node, request(parts=tuple(parts)), seconds)

    answers, unreached = [], dict[Part, str]()
    for (*_, parts), answer in zip(
        machines, fleet.map_parallel(machines, ask_machine), strict=True
    ):
        if isinstance(answer, OrchestratorError):
            unreached.update(dict.fromkeys(parts, answer.what))
        else:
            answers.append(answer)
    return answers, unreached


def by_machine(records: Sequence[JobRecord], ssh_config: Path | None) -> list[Machine]:
    from orchestrator.head.schedulers.backend import backend_of

    machines: dict[object, Machine] = {}
    for record in records:
        if record.scheduled:
            # The scheduler may have given the nodes to another job.
            continue
        backend = backend_of(record)
        how = (type(backend), ssh_config or record.ssh_config, record.launch.strict_host_keys)
        for node in (*record.nodes, *record.spares):
            key = (*how, node.host, node.user, node.port, node.python, node.activate, node.wrap)
            if key not in machines:
                machines[key] = node, backend.transport(record, ssh_config), {}
            machines[key][2][record.job, node.part] = None
    return list(machines.values())


# -- the removal ------------------------------------------------------------------------------

# Each experiment that is held takes two file descriptors.
BATCH = 100


@dataclass
class Removal:
    """The removal of what was selected in a directory of experiments."""

    root: int
    directory: Path
    ssh_config: Path | None = None
    on_nodes: bool = False
    # {node: the reason why it could not be reached}
    unreached: dict[str, str] = field(default_factory=dict)
    freed_on_nodes: int = 0
    # Called with the number of bytes that were freed.
    seen: Callable[[int], None] = lambda _: None

    def go(self, entries: Sequence[PruneEntry], leftovers: Sequence[Removable] = ()) -> None:
        """Remove the selected experiments, and the remains of interrupted removals."""
        for one in leftovers:
            with self.noted(one), files.open_directory(one.name, self.root) as directory:
                lock_of_prune(directory)
                self.delete(one, one.name)
        going = [entry for entry in entries if entry.action == SELECTED]
        shared = {entry.record.job for entry in entries if entry.action == KEPT}
        for start in range(0, len(going), BATCH):
            with contextlib.ExitStack() as stack:
                batch = going[start : start + BATCH]
                held: dict[str, tuple[int, BinaryIO]] = {}
                for entry in batch:
                    with self.noted(entry):
                        held[entry.name] = stack.enter_context(self.hold(entry))
                if self.on_nodes:
                    self.clean_nodes([one for one in batch if one.name in held], shared)
                for entry in batch:
                    with self.noted(entry):
                        if entry.action == SELECTED:
                            self.take(entry, *held[entry.name])

    @contextlib.contextmanager
    def noted(self, one: Removable) -> Iterator[None]:
        """Record the reason if a directory could not be removed."""
        try:
            yield
        except NotRemovable as why:
            one.stays(str(why))
        except FileNotFoundError:
            one.stays("another process has removed it")
        except OSError as error:
            one.action = FAILED
            one.reason = f"{error.strerror}, in {shown_name(self.directory)}"

    def clean_nodes(self, batch: Sequence[PruneEntry], shared: set[str]) -> None:
        """Remove the files of these jobs on their nodes, before their records are removed.

        Only the record says which nodes a job ran on: it stays until all of them were cleaned, or
        the rest would never be found again. A job whose record was also copied to an experiment
        that stays keeps its files on the nodes.
        """
        cleaned = [entry for entry in batch if entry.record.job not in shared]
        records = [entry.record for entry in cleaned]
        answers, silent = ask_machines(Remove, records, self.ssh_config, FILES_ANSWER_SECONDS)
        self.freed_on_nodes += sum(answer.freed for answer in answers)
        problems = {(one.job, one.part): one.problem for answer in answers for one in answer.parts}
        for entry in cleaned:
            for node in entry.record.nodes:
                part = (entry.record.job, node.part)
                if part in silent:
                    self.unreached[node.name] = silent[part]
                reason = silent.get(part) or problems.get(part)
                if reason and entry.action == SELECTED:
                    entry.action, entry.reason = FAILED, f"on node {node.name}: {reason}"

    @contextlib.contextmanager
    def hold(self, entry: PruneEntry) -> Iterator[tuple[int, BinaryIO]]:
        """Lock an experiment against heads and other prunes, and check it again."""
        with files.open_directory(entry.name, self.root) as directory:
            lock_of_prune(directory)
            with lock_of_head(directory, os.O_CREAT) as lock:
                status = os.fstat(directory)
                if (status.st_dev, status.st_ino) != entry.identity:
                    raise NotRemovable("it was replaced a moment ago")
                if is_pinned(directory):
                    raise NotRemovable("it has just been pinned")
                if obstacle := mount_inside(self.directory / entry.name):
                    raise NotRemovable(obstacle)
                yield directory, lock

    def take(self, entry: PruneEntry, directory: int, lock: BinaryIO) -> None:
        """Hide an experiment and delete it.

        A network disk keeps a deleted file that is open, and with it the directory: the lock goes
        first, as it is found by a name that is hidden by now.
        """
        hidden = files.hidden_name(entry.name)
        files.hide_directory(entry.name, hidden, self.root)
        now = os.stat(hidden, dir_fd=self.root, follow_symlinks=False)
        if not os.path.samestat(now, os.fstat(directory)):
            os.rename(hidden, entry.name, src_dir_fd=self.root, dst_dir_fd=self.root)
            raise NotRemovable("something else has taken its name")
        lock.close()
        self.delete(entry, hidden)

    def delete(self, one: Removable, name: str) -> None:
        problems = files.delete_directory(name, self.seen, self.root)
        one.action = FAILED if problems else REMOVED
        if problems:
            more = f", and {len(problems) - 1} more" if problems[1:] else ""
            one.reason = f"some of it could not be deleted: {shown_name(problems[0])}{more}"


def lock_of_prune(directory: int) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise NotRemovable("another prune is removing it") from None
    except OSError:
        # NFS has no locks on directories. Two prunes that delete the same one do no harm.
        pass
