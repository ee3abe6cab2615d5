"""The experiment directory: its layout, its record (job.json), finding it again."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.common.permissions import others
from orchestrator.config.launch import Launch
from orchestrator.protocol.events import RankState
from orchestrator.protocol.message import decode, encode, parse
from orchestrator.records import trust
from orchestrator.records.outcome import Head, JobVerdict, Receipt, SlowRank

RECORD = "job.json"
LARGEST_RECORD_BYTES = 64 << 20
TRUST = "--trust-record"
STAMP = re.compile(r".+_\d{8}_\d{6}")
SLURM_JOB = "slurm_job"  # a file with the number, there before anything else is
HEAD_LOG = "head.log"  # what the head did, beside the logs of the nodes
SHOWN = ".shown"
IGNORED = ".gitignore"  # of the directory of all experiments
NO_RESTART = ".no_restart"
STEAL = ".steal"  # who wants to be the head in place of another
NOTIFY = ".notify"  # the commands of --notify, with the secrets in them
RESTARTING = "restarting"  # the state of a job between two attempts
NOT_STARTED = "not started"  # the state of the nodes of a job that was given up at its start
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")


@dataclass(frozen=True)
class NodeRecord:
    """One node of the job, as needed to find it again and to say how it ended."""

    index: int
    name: str  # as the user wrote it
    host: str
    user: str | None
    port: int | None
    address: str
    python: str
    first_rank: int
    nproc: int
    state: str = "starting"
    exit_code: int | None = None
    ranks: dict[int, RankState] = field(default_factory=dict)
    # Of its start, in Unix seconds of the head's clock: supervisor, torch, ranks, output
    times: dict[str, float] = field(default_factory=dict)
    clock: float = 0.0  # seconds that its clock is ahead of the head's, where that misleads
    activate: str | None = None  # what its Python needs to start
    wrap: str | None = None  # the command around it
    # Of a later attempt: this machine's part of its first one, and what the log here had before.
    first_job: str = ""
    first_node: int = 0
    log_before: int = 0
    ranks_before: int = 0
    runs: str = ""  # names its directory for jobs: of this login, on this machine

    @property
    def place(self) -> list[Any]:
        """Return how it is reached, and what runs there, as earlier versions signed it, too."""
        known = [self.index, self.host, self.user, self.port, self.address, self.python]
        return known + [way for way in (self.activate, self.wrap) if way]

    @property
    def numbers(self) -> range:
        """Return the ranks that run there: what it says of others is not believed."""
        return range(self.first_rank, self.first_rank + self.nproc)

    @property
    def in_doubt(self) -> bool:
        """Tell whether its part was to begin, and nobody has heard that it has."""
        return self.state in ("starting", "lost") and not self.times


@dataclass(frozen=True)
class Attempt:
    """One start of a job that may be started again, and how it ended."""

    number: int  # from 1
    job: str
    started: float
    ended: float
    state: str  # failed or lost; done or stopped of the last one
    exit_code: int | None
    verdict: JobVerdict | None
    nodes: list[str]  # names
    codes: list[int] = field(default_factory=list)  # exit codes of its ranks, each once
    step: int | None = None  # that it had reached, where that is known
    printed: int | None = None  # the step that its lines told last
    restarted: bool = False
    why: str = ""  # it was started again, or not
    ran: float | None = None  # seconds since all of its ranks had begun; 0: they never did
    clock: float = 0.0  # of rank 0's node, minus the head's
    # Of each node: the bytes of its log here before. Empty if nothing was started.
    log_before: list[int] = field(default_factory=list)

    @property
    def never_began(self) -> bool:
        """Tell whether nothing was started: a node could not be given what it needs, say."""
        return self.ran == 0 and not self.log_before

    @property
    def alive(self) -> float:
        """Return for how long its ranks ran, or the attempt if that is not known."""
        return self.ended - self.started if self.ran is None else self.ran


@dataclass(frozen=True)
class JobRecord:
    """The content of job.json."""

    job: str
    experiment: str
    state: str  # queued, starting, running, restarting, done, failed, stopped, lost
    command: list[str]
    nodes: list[NodeRecord]
    started: float
    head: Head = field(default_factory=Head)
    ssh_config: str | None = None
    master: str = ""
    launch: Launch = field(default_factory=Launch)  # the options; `start` is the way chosen
    ended: float | None = None
    exit_code: int | None = None
    verdict: JobVerdict | None = None
    slow: list[SlowRank] = field(default_factory=list)  # who held the others up
    goodput: dict[str, float] = field(default_factory=dict)  # seconds by what they went into
    receipts: dict[str, Receipt] = field(default_factory=dict)  # by node, of `stop`
    slurm_job: str | None = None  # the Slurm job that has these nodes
    batch: bool = False  # its head is that job's batch script
    part_of: int = 0  # run-node: the number of nodes of the job; this record is of one of them
    attempts: list[Attempt] = field(default_factory=list)  # that have ended; `job` is the next one
    spares: list[NodeRecord] = field(default_factory=list)  # that an attempt may run on
    engine: bool = True  # the built-in training, which does the steps of its config; else a program

    def node(self, index: int) -> NodeRecord:
        return next(node for node in self.nodes if node.index == index)

    def check_choice(self, node: int | None, rank: int | None, written: str) -> None:
        """Refuse a node or a rank that the job does not have, in the form that the user wrote."""
        nodes = [part.index for part in self.nodes]
        ranks = [rank for part in self.nodes for rank in part.numbers]
        for name, chosen, known in (("node", node, nodes), ("rank", rank, ranks)):
            if chosen is not None and chosen not in known:
                has = f"{name}s {known[0]} to {known[-1]}" if known else f"no {name}s yet"
                raise UsageError(f"{written.format(name, chosen)}: this job has {has}")

    @property
    def head_elsewhere(self) -> bool:
        """Tell whether the job's head can run only where the job is."""
        return self.batch or bool(self.part_of)

    @property
    def scheduled(self) -> bool:
        """Tell whether its nodes are a scheduler's, and another job's when this one is over."""
        return self.batch or self.slurm_job is not None

    @property
    def over(self) -> bool:
        return self.state not in ("queued", "starting", "running", RESTARTING)

    @property
    def goes_on(self) -> bool:
        """Tell whether an attempt has ended, and the next one is to be started."""
        return self.state == RESTARTING

    @property
    def attempt(self) -> int:
        """Return the number of the attempt that runs, or ran last."""
        return max(1, len(self.attempts) + (not self.over))

    @property
    def former_end(self) -> float:
        """Return when the attempt before this one was over; 0 where there was none."""
        return max((one.ended for one in self.attempts if one.job != self.job), default=0.0)

    @property
    def lost(self) -> list[NodeRecord]:
        """Return the nodes, and those that stand by, which nobody has heard the end from."""
        return [node for node in (*self.nodes, *self.spares) if node.state == "lost"]

    @property
    def latest(self) -> list[Attempt]:
        """Return the last attempt whose ranks had begun, and those after it, which had none."""
        vain = len(list(itertools.takewhile(lambda one: one.ran == 0, reversed(self.attempts))))
        return self.attempts[-vain - 1 :]

    def first_part(self, node: NodeRecord) -> tuple[str, int]:
        """Return where on a node its part of the job is described: by which attempt, as which."""
        if node.first_job:
            return node.first_job, node.first_node
        return (self.attempts[0].job if self.attempts else self.job), node.index

    @property
    def orders(self) -> dict[str, Any]:
        """Return what it decides about the commands that run: this is what a login signs."""
        orders = {
            "job": self.job,
            "batch": self.batch,
            "part_of": self.part_of,
            "ssh_config": self.ssh_config,
            "strict_host_keys": self.launch.strict_host_keys,
            "nodes": [node.place for node in self.nodes],
        }
        return {**orders, "spares": [s.place for s in self.spares]} if self.spares else orders


class Untrusted(UsageError):
    """Somebody else may have written the record."""

    def __init__(self, path: Path, problem: str) -> None:
        self.ours = not problem.startswith("belongs")
        mine = f"chmod -R go-w {path}; or " if self.ours else ""
        super().__init__(
            f"{path} is skipped: it {problem}, and its record could name any program to run",
            f"{mine}add {TRUST}, to take it and do what it says",
        )
        self.path = path
        self.problem = problem


def read_record(directory: int, path: Path, *, trusted: bool = False) -> JobRecord:
    """Read the record in an open directory; Untrusted if somebody else may have written it."""
    with files.open_plain(RECORD, directory) as file:
        problem = others(os.fstat(directory)) or others(os.fstat(file.fileno()))
        record = decode(JobRecord, parse(file.read(LARGEST_RECORD_BYTES)), newer=True)
    if problem and not trusted and trust.signature(directory, record.orders) != problem:
        raise Untrusted(path, problem)
    return record


def laid_out(value: object) -> str:
    """Return JSON on one line, or a line for each element of a list of objects."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


class Experiment:
    """One directory under --experiments. `trusted`: whoever wrote its record."""

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self.trusted = trusted
        self._lock: int | None = None
        self.made_root = False  # the directory of all experiments was not there before

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def head_log(self) -> Path:
        return self.logs / HEAD_LOG

    def log(self, node: NodeRecord) -> Path:
        address = re.sub(r"[^A-Za-z0-9_.%-]", "-", node.address)
        return self.logs / f"node_{node.index}_{address}.txt"

    def ranks(self, node: NodeRecord) -> Path:
        return self.log(node).with_suffix(".ranks")

    def write(self, name: str, text: str) -> None:
        """Write a whole file in the experiment's directory."""
        with files.replacing(self.path / name) as file:
            with files.opened(self.path) as directory:
                files.give_to_owner_of(directory, file.fileno())
            file.write(text.encode(errors="backslashreplace"))  # names that are no text

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """Write a line for each field and each node, to be read by eye; 4,096 ranks take 10 ms."""
        fields = (f"{json.dumps(field)}: {laid_out(value)}" for field, value in data.items())
        self.write(name, "{\n" + ",\n".join(fields) + "\n}\n")

    def write_record(self, record: JobRecord) -> None:
        self.write_json(RECORD, encode(record))

    def read_record(self) -> JobRecord:
        try:
            with files.opened(self.path) as directory:
                record = read_record(directory, self.path, trusted=self.trusted)
        except Untrusted:
            raise
        except FileNotFoundError as error:  # pruned, while a page of it was open
            gone = f"{self.path / RECORD} is not there: it was removed, or is not an experiment"
            raise UsageError(gone) from error
        except (OSError, ValueError, UsageError) as error:
            raise UsageError(f"{self.path / RECORD} is not the record of a job: {error}") from error
        if record.batch and record.slurm_job is None:  # submitted, and not started yet
            return replace(record, slurm_job=self.slurm_job())
        return record

    def sign(self, record: JobRecord) -> None:
        """Note that this login launched the job: what the record orders may be done."""
        trust.sign(self.path, record.orders)

    def write_signed(self, record: JobRecord) -> None:
        """Write a record with orders of this login, old or new: there is no moment without."""
        self.sign(record)
        self.write_record(record)

    def is_launched_here(self, record: JobRecord) -> bool:
        """Tell whether this login launched the job, or says that it trusts the record."""
        if self.trusted:
            return True
        with contextlib.suppress(OSError), files.opened(self.path) as directory:
            return trust.signature(directory, record.orders) is not None
        return False

    def check_launched(self, record: JobRecord) -> None:
        """Refuse to do what a record says that this login did not launch; trust is remembered."""
        if not self.is_launched_here(record):
            raise UsageError(
                f"{self.path} was not launched by this login: the machines and programs that its"
                " record names are not used",
                f"if it is yours all the same (launched by an earlier version, or on a machine with"
                f" another home), or its owner's word will do, add {TRUST}",
            )
        if self.trusted and self.path.stat().st_uid == os.geteuid():
            trust.sign(self.path, record.orders)

    @property
    def elsewhere(self) -> bool:
        """Tell whether this is another machine's part of a job."""
        with contextlib.suppress(UsageError):
            record = self.read_record()
            return bool(record.part_of) and record.head.host != os.uname().nodename
        return False

    def slurm_job(self) -> str | None:
        try:
            return (self.path / SLURM_JOB).read_text(encoding="ascii").strip() or None
        except OSError:
            return None

    def lock(self, *, background: bool = False) -> Head | None:
        """Become the one head of this job, until this process ends; return who else is, if any.

        One in the background says so of itself: whoever comes next may take over from it.
        """
        path = self.path / ".head"
        try:
            fd, mine = open_locked(path)
            if not mine and is_of_another_login(fd):
                os.close(fd)
                files.replace(path, b"")
                fd, mine = open_locked(path)
            with contextlib.suppress(PermissionError), files.opened(self.path) as directory:
                os.fchmod(fd, files.PRIVATE)
                files.give_to_owner_of(directory, fd)
        except OSError as error:
            raise UsageError(
                f"{self.name} cannot be followed from here: {path}: {error.strerror}",
                "only the login that owns the experiment can; `orchestrator status` works",
            ) from error
        if not mine:
            with os.fdopen(fd, "rb") as file:
                return Head.read(file.read())
        self._lock = fd
        self.name_head(background=background)
        (self.path / STEAL).unlink(missing_ok=True)
        return None

    def name_head(self, *, background: bool) -> None:
        """Write into the lock, which this process holds, who it is."""
        assert self._lock is not None
        who = replace(this_head(), background=background)
        with contextlib.suppress(OSError):  # a full disk: then only its name is not known
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, json.dumps(encode(who)).encode(), 0)

    @property
    def followed(self) -> bool:
        """Tell whether a head follows this job now."""
        try:
            fd = os.open(self.path / ".head", os.O_RDONLY)
        except OSError:  # nobody ever did, or it is another login's
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return not is_of_another_login(fd)
        finally:
            os.close(fd)
        return False

    def hold(self, name: str) -> bool:
        """Hold a place that one process at a time may have, until this process ends."""
        try:
            descriptor, mine = open_locked(self.path / name)
        except OSError as error:
            raise UsageError(f"{self.path / name} cannot be written: {error.strerror}") from error
        if not mine:
            os.close(descriptor)
        return mine

    def successor(self) -> Head | None:
        """Return another head that wants to take this one's place, if there is one."""
        try:
            return Head.read((self.path / STEAL).read_bytes())
        except OSError:
            return None

    def steal(self, patience: float) -> Head | None:
        """Become the one head in another's place; return the other if it does not leave in time."""
        deadline = time.monotonic() + patience
        holder = self.lock()
        while holder is not None and time.monotonic() < deadline:
            self.write(STEAL, json.dumps(encode(this_head())))
            time.sleep(0.1)
            holder = self.lock()
        (self.path / STEAL).unlink(missing_ok=True)
        return holder

    def forbid_restarts(self) -> None:
        """Leave a mark for the head that may just be starting the job again."""
        self.write(NO_RESTART, "")

    @property
    def restarts_are_forbidden(self) -> bool:
        return (self.path / NO_RESTART).exists()

    def keep_shown(self, positions: dict[int, int]) -> None:
        """Remember how much of each node's log the user has seen, for who attaches next."""
        with contextlib.suppress(OSError):  # a full disk
            self.write(SHOWN, json.dumps(positions))

    def take_shown(self) -> dict[int, int] | None:
        """Return what keep_shown() kept, once: what follows is shown by whoever asks."""
        try:
            kept = json.loads((self.path / SHOWN).read_text(encoding="ascii"))
            positions = {int(node): int(position) for node, position in kept.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        (self.path / SHOWN).unlink(missing_ok=True)
        return positions

    def discard(self) -> None:
        """Undo create(), and remove what is written before anything is started."""
        if self.slurm_job() is not None:
            return  # it was submitted before, and its record says what became of it
        for file in (".head", RECORD, NOTIFY, trust.SIGNATURE):
            (self.path / file).unlink(missing_ok=True)
        for each in (HEAD_LOG, f"{HEAD_LOG}.1"):
            (self.logs / each).unlink(missing_ok=True)
        for inner in (self.path / "outputs", self.logs, self.path):
            inner.rmdir()
        if self.made_root:
            with contextlib.suppress(OSError):  # another launch uses it by now
                if [entry.name for entry in self.path.parent.iterdir()] == [IGNORED]:
                    (self.path.parent / IGNORED).unlink()
                self.path.parent.rmdir()

    def again(self) -> Experiment:
        """Prepare this directory for the next attempt of the job.

        The logs and the record of the last attempt are put aside; outputs and checkpoints stay. A
        job that was only queued has no logs.
        """
        if self.logs.is_dir() and any(self.logs.iterdir()):
            aside = self.path / "attempts" / str(len(list(self.path.glob("attempts/*"))) + 1)
            aside.parent.mkdir(mode=0o700, exist_ok=True)
            files.make_private(aside)
            shutil.copy2(self.path / RECORD, aside)  # a job without a record would be none
            for name in ("logs", "manifest.json", "hang"):
                if (self.path / name).exists():
                    (self.path / name).rename(aside / name)
            files.make_private(self.logs)
        return self

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def open_locked(path: Path) -> tuple[int, bool]:
    """Open a file for its owner alone, and lock it; False, where another process has the lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, files.PRIVATE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return descriptor, False
    return descriptor, True


def is_of_another_login(descriptor: int) -> bool:
    """Return True if the lock of a file is held by a login that may only read the file.

    A lock of flock(2) needs no more than that, and must not keep the owner out.
    """
    status = os.fstat(descriptor)
    device, owners = status.st_dev, (status.st_uid, 0)
    name = f"{os.major(device):02x}:{os.minor(device):02x}:{status.st_ino}"
    with contextlib.suppress(OSError), Path("/proc/locks").open() as locks:
        held = [fields for fields in map(str.split, locks) if fields[1] == "FLOCK"]
        pids = [fields[4] for fields in held if fields[5] == name]
        return any(Path("/proc", pid).stat().st_uid not in owners for pid in pids)
    return False


def this_head() -> Head:
    return Head(os.uname().nodename, os.getpid(), time.time())
