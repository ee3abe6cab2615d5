"""An experiment's directory: its layout, its record (job.json) and the lock of its head."""

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

from orchestrator.common import files, hiding
from orchestrator.common.errors import UsageError
from orchestrator.common.permissions import other_writers
from orchestrator.config import resolved
from orchestrator.config.launch import Launch
from orchestrator.protocol.events import RankState
from orchestrator.protocol.message import Nonsense, decode_value, parse_object, to_dict, to_json
from orchestrator.records import trust
from orchestrator.records.outcome import Head, JobVerdict, Receipt, SlowRank

RECORD = "job.json"
LARGEST_RECORD_BYTES = 64 << 20
TRUST = "--trust-record"
STAMP = re.compile(r".+_\d{8}_\d{6}")
# This file holds the number of the Slurm job. It is written before every other file.
SLURM_JOB = "slurm_job"
# The head logs here, beside the logs of the nodes.
HEAD_LOG = "head.log"
SHOWN = ".shown"
NO_RESTART = ".no_restart"
# Names a process that asks to become the head in place of the current one.
STEAL = ".steal"
# Holds the commands of --notify, including their secrets.
NOTIFY = ".notify"
# The state of a job between two attempts.
RESTARTING = "restarting"
# The state of the nodes of a job that was given up while it started.
NOT_STARTED = "not started"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")


@dataclass(frozen=True)
class NodeRecord:
    """One node of the job: how to reach it, and how its ranks ended."""

    # Its place in this attempt.
    index: int
    # As the user wrote it.
    name: str
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
    # Milestones of its start by the head's clock (Unix time): supervisor, torch, ranks, output.
    times: dict[str, float] = field(default_factory=dict)
    # Seconds by which its clock is ahead of the head's. 0.0 where the difference does not matter.
    clock: float = 0.0
    # Shell code that its Python needs before it starts.
    activate: str | None = None
    # The command that wraps its Python.
    wrap: str | None = None
    # The number of its part of the job, the same in all attempts; at first its index.
    part: int = -1
    # The length of its logs here before this attempt began.
    log_before: int = 0
    ranks_before: int = 0
    # Identifies the directory for jobs of this login on this machine.
    runs: str = ""
    # True if its ranks write into the head's own directory of the experiment, on a shared disk.
    shared: bool = False

    def __post_init__(self) -> None:
        if self.part < 0:
            object.__setattr__(self, "part", self.index)

    @property
    def place(self) -> list[Any]:
        """Return how it is reached and what runs there, as earlier versions signed it."""
        known = [self.index, self.host, self.user, self.port, self.address, self.python]
        return known + [way for way in (self.activate, self.wrap) if way]

    @property
    def numbers(self) -> range:
        """Return the ranks that run there. The node is not believed about other ranks."""
        return range(self.first_rank, self.first_rank + self.nproc)

    @property
    def in_doubt(self) -> bool:
        """Return True if its part was to be started and no start was reported."""
        return self.state in ("starting", "lost") and not self.times


@dataclass(frozen=True)
class Attempt:
    """One attempt of a job that may be restarted, and how it ended."""

    # Counts from 1.
    number: int
    started: float
    ended: float
    # One of failed and lost. The last attempt may also be done or stopped.
    state: str
    exit_code: int | None
    verdict: JobVerdict | None
    nodes: list[str]
    # The distinct exit codes of its ranks.
    codes: list[int] = field(default_factory=list)
    # The step that it had reached, if known.
    step: int | None = None
    # The last step that its output mentioned.
    printed: int | None = None
    restarted: bool = False
    # Why the job was restarted after it, or was not.
    why: str = ""
    # Seconds between the start of all its ranks and its end. 0 if they never started.
    ran: float | None = None
    # The clock of rank 0's node minus the head's clock, in seconds.
    clock: float = 0.0
    # The bytes that each node's log had here before. Empty if nothing was started.
    log_before: list[int] = field(default_factory=list)

    @property
    def never_began(self) -> bool:
        """Return True if nothing was started, for example because a node could not be prepared."""
        return self.ran == 0 and not self.log_before

    @property
    def alive(self) -> float:
        """Return how long its ranks ran, else how long the attempt took."""
        return self.ended - self.started if self.ran is None else self.ran


@dataclass(frozen=True)
class JobRecord:
    """The content of job.json."""

    job: str
    experiment: str
    # One of queued, starting, running, restarting, done, failed, stopped, lost.
    state: str
    command: list[str]
    nodes: list[NodeRecord]
    started: float
    head: Head = field(default_factory=Head)
    ssh_config: str | None = None
    master: str = ""
    # The options of the launch. `start` is the method that was chosen.
    launch: Launch = field(default_factory=Launch)
    ended: float | None = None
    exit_code: int | None = None
    verdict: JobVerdict | None = None
    # The ranks that held the others up.
    slow: list[SlowRank] = field(default_factory=list)
    # Seconds by the part of records/goodput.py that they belong to.
    goodput: dict[str, float] = field(default_factory=dict)
    # The receipts of `stop`, by node.
    receipts: dict[str, Receipt] = field(default_factory=dict)
    # The Slurm job whose allocation has these nodes.
    slurm_job: str | None = None
    # Its head runs in the batch script of that Slurm job.
    batch: bool = False
    # Set by run-node: the number of nodes of the job, of which this record describes one.
    part_of: int = 0
    # The number of the attempt that runs, or ran last; 0 is counted from the ended ones.
    attempt: int = 0
    # Attempts that have ended.
    attempts: list[Attempt] = field(default_factory=list)
    # Spare nodes, which a later attempt may use.
    spares: list[NodeRecord] = field(default_factory=list)
    # True for the built-in training, which does the steps of its config. False for a script.
    engine: bool = True
    # The words of the user's program, without the launch's options; empty for the engine.
    program: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.attempt:
            number = max(1, len(self.attempts) + (not (self.over or self.goes_on)))
            object.__setattr__(self, "attempt", number)

    def node(self, index: int) -> NodeRecord:
        return next(node for node in self.nodes if node.index == index)

    def check_choice(self, node: int | None, rank: int | None, written: str) -> None:
        """Raise UsageError for a node or rank that the job does not have.

        `written` is the format of the option that the user gave.
        """
        nodes = [part.index for part in self.nodes]
        ranks = [rank for part in self.nodes for rank in part.numbers]
        for name, chosen, known in (("node", node, nodes), ("rank", rank, ranks)):
            if chosen is not None and chosen not in known:
                has = f"{name}s {known[0]} to {known[-1]}" if known else f"no {name}s yet"
                raise UsageError(f"{written.format(name, chosen)}: this job has {has}")

    @property
    def head_elsewhere(self) -> bool:
        """Return True if the job's head can run only on the nodes of the job."""
        return self.batch or bool(self.part_of)

    @property
    def is_elsewhere(self) -> bool:
        """Return True if this is another machine's part of a job."""
        return bool(self.part_of) and self.head.host != os.uname().nodename

    @property
    def scheduled(self) -> bool:
        """Return True if a scheduler owns its nodes and gives them to other jobs afterwards."""
        return self.batch or self.slurm_job is not None

    @property
    def over(self) -> bool:
        return self.state not in ("queued", "starting", "running", RESTARTING)

    @property
    def goes_on(self) -> bool:
        """Return True if an attempt has ended and the next one is about to start."""
        return self.state == RESTARTING

    @property
    def former_end(self) -> float:
        """Return the end of the attempt before this one, or 0 if there was none."""
        ends = (one.ended for one in self.attempts if one.number < self.attempt)
        return max(ends, default=0.0)

    @property
    def latest(self) -> list[Attempt]:
        """Return the last attempt whose ranks started, and the attempts after it."""
        vain = len(list(itertools.takewhile(lambda one: one.ran == 0, reversed(self.attempts))))
        return self.attempts[-vain - 1 :]

    @property
    def orders(self) -> dict[str, Any]:
        """Return the fields that decide which commands run. A login signs these."""
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
    """Another user may have written the record."""

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
    """Read the record in an open directory. Raise Untrusted if another user may have written it."""
    with files.open_plain(RECORD, directory) as file:
        problem = other_writers(os.fstat(directory)) or other_writers(os.fstat(file.fileno()))
        record = decode_value(JobRecord, parse_object(file.read(LARGEST_RECORD_BYTES)), newer=True)
    if problem and not trusted and trust.signed_exposure(directory, record.orders) != problem:
        raise Untrusted(path, problem)
    return record


def to_json_lines(value: object) -> str:
    """Return JSON on one line, or a line for each element of a list."""
    if isinstance(value, list) and value:
        return "[\n " + ",\n ".join(map(to_json, value)) + "\n]"
    return to_json(value)


def fields_to_json(data: Mapping[str, Any]) -> str:
    """Return JSON with one line for each field and node. 4,096 ranks take 10 ms."""
    fields = (f"{json.dumps(field)}: {to_json_lines(value)}" for field, value in data.items())
    return "{\n" + ",\n".join(fields) + "\n}\n"


class Experiment:
    """One directory under --experiments. With `trusted`, every writer of its record is trusted."""

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self.trusted = trusted
        self._lock: int | None = None

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
        """Write a whole file in the experiment's directory, with what it has of secrets."""
        with files.open_replacement(self.path / name) as file:
            with files.open_directory(self.path) as directory:
                files.give_to_owner_of(directory, file.fileno())
            # Names of files and hosts need not be valid Unicode.
            file.write(text.encode(errors="backslashreplace"))

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        self.write(name, fields_to_json(hiding.without_secrets(data)))

    def write_yaml(self, name: str, data: dict[str, Any]) -> None:
        self.write(name, resolved.yaml_of(hiding.without_secrets(data)))

    def write_record(self, record: JobRecord) -> None:
        """Write job.json without secrets in its texts; later heads need its names as they are."""
        texts: dict[str, Any] = {
            name: hiding.without_secrets(getattr(record, name))
            for name in ("command", "program", "verdict", "slow")
        }
        attempts = [
            replace(
                one,
                why=hiding.without_secrets(one.why),
                verdict=hiding.without_secrets(one.verdict),
            )
            for one in record.attempts
        ]
        self.write(RECORD, fields_to_json(to_dict(replace(record, **texts, attempts=attempts))))

    def read_record(self) -> JobRecord:
        try:
            with files.open_directory(self.path) as directory:
                record = read_record(directory, self.path, trusted=self.trusted)
        except Untrusted:
            raise
        except FileNotFoundError as error:
            # It may be pruned while a page of it is open.
            raise UsageError(
                f"{self.path / RECORD} is not there: it was removed, or is not an experiment"
            ) from error
        except (OSError, ValueError, UsageError) as error:
            raise UsageError(f"{self.path / RECORD} is not the record of a job: {error}") from error
        # It was submitted and has not started yet.
        waits = record.batch and record.slurm_job is None
        return replace(record, slurm_job=self.slurm_job()) if waits else record

    def write_signed(self, record: JobRecord) -> None:
        """Sign a record as this login's own and write it.

        The record on disk has a valid signature at every moment.
        """
        trust.sign_orders(self.path, record.orders)
        self.write_record(record)

    def is_launched_here(self, record: JobRecord) -> bool:
        """Return True if this login launched the job or the user trusts its record."""
        with contextlib.suppress(OSError), files.open_directory(self.path) as directory:
            return self.trusted or trust.signed_exposure(directory, record.orders) is not None
        return self.trusted

    def check_launched(self, record: JobRecord) -> None:
        """Raise UsageError for a record that this login neither signed nor trusts.

        The login signs a trusted record if it owns the directory.
        """
        if not self.is_launched_here(record):
            raise UsageError(
                f"{self.path} was not launched by this login: the machines and programs that its"
                " record names are not used",
                f"if it is yours all the same (launched by an earlier version, or on a machine with"
                f" another home), or its owner's word will do, add {TRUST}",
            )
        if self.trusted and self.path.stat().st_uid == os.geteuid():
            trust.sign_orders(self.path, record.orders)

    def slurm_job(self) -> str | None:
        try:
            return files.read_plain(self.path / SLURM_JOB).decode("ascii").strip() or None
        except OSError:
            return None

    def lock(self, *, background: bool = False) -> Head | None:
        """Become the only head of this job until this process ends, or return the present head.

        A head in the background records that it is one. A later head may replace it.
        """
        path = self.path / ".head"
        try:
            fd, mine = open_locked(path)
            with contextlib.suppress(PermissionError), files.open_directory(self.path) as directory:
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
        """Write the identity of this process into the lock, which it holds."""
        assert self._lock is not None
        # On a full disk, only the name of the head is lost.
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, to_json(this_head(background=background)).encode(), 0)

    @property
    def followed(self) -> bool:
        """Return True if a head follows this job now."""
        # No head ever followed it, or the lock belongs to another login.
        with contextlib.suppress(OSError), files.open_plain(self.path / ".head") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return not is_of_another_login(file.fileno())
        return False

    def hold(self, name: str) -> bool:
        """Lock a file until this process ends. Return False if another process holds the lock."""
        descriptor, mine = open_locked(self.path / name)
        if not mine:
            os.close(descriptor)
        return mine

    def successor(self) -> Head | None:
        """Return the process that asks to replace this head, if there is one."""
        try:
            return Head.read(files.read_plain(self.path / STEAL))
        except OSError:
            return None

    def steal(self, patience: float) -> Head | None:
        """Replace the present head. Return it if it does not leave within `patience` seconds."""
        deadline = time.monotonic() + patience
        holder = self.lock()
        while holder is not None and time.monotonic() < deadline:
            self.write(STEAL, to_json(this_head()))
            time.sleep(0.1)
            holder = self.lock()
        (self.path / STEAL).unlink(missing_ok=True)
        return holder

    def forbid_restarts(self) -> None:
        """Leave a mark for a head that may be restarting the job at this moment."""
        self.write(NO_RESTART, "")

    @property
    def restarts_are_forbidden(self) -> bool:
        return (self.path / NO_RESTART).exists()

    def keep_shown(self, positions: dict[int, int]) -> None:
        """Store how much of each node's log the user has seen, for the next `attach`."""
        with contextlib.suppress(OSError):
            self.write(SHOWN, json.dumps(positions))

    def take_shown(self) -> dict[int, int] | None:
        """Return the positions that keep_shown() stored, and delete them."""
        try:
            positions = decode_value(
                dict[int, int], parse_object(files.read_plain(self.path / SHOWN))
            )
        except (OSError, Nonsense):
            return None
        (self.path / SHOWN).unlink(missing_ok=True)
        return positions

    def discard(self) -> None:
        """Delete an experiment that was created and not started.

        One that was submitted before stays, as its record describes its fate.
        """
        if self.slurm_job() is None:
            files.delete_directory(self.path)

    def again(self) -> Experiment:
        """Prepare this directory for the next attempt of the job.

        The logs and the record of the last attempt move into attempts/. Outputs and checkpoints
        stay. A job that was only queued has no logs.
        """
        if self.logs.is_dir() and any(self.logs.iterdir()):
            aside = self.path / "attempts" / str(len(list(self.path.glob("attempts/*"))) + 1)
            aside.parent.mkdir(mode=0o700, exist_ok=True)
            files.make_private(aside)
            # Copied, not moved: a directory without a record is no job.
            shutil.copy2(self.path / RECORD, aside)
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
    """Open a private file and lock it. The second value is False if another process holds it.

    A login that may only read the file keeps its lock of it, and the file is replaced.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, files.PRIVATE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not is_of_another_login(descriptor):
            return descriptor, False
        os.close(descriptor)
        files.replace_file(path, b"")
        return open_locked(path)
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


def this_head(*, background: bool = False) -> Head:
    return Head(os.uname().nodename, os.getpid(), time.time(), background)
