"""Finds the processes of a job on this node.

A process belongs to a job if ORCHESTRATOR_RUN in its environment names the run directory of one of
the job's attempts: supervisors alone set it. A process with another environment belongs to the job
as a descendant of its supervisor or of its processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from orchestrator.node.job import processes
from orchestrator.node.job.processes import Process, ProcessSet
from orchestrator.node.job.run_directory import JOB_NAME, PartDir, RunDir, machine_name
from orchestrator.protocol.requests.request import Part

# The time limit for stopping processes that fork all the time.
CHASE_SECONDS = 1.0
# Python's tracker removes shared memory that the processes of a rank leave.
TRACKER = "resource_tracker"
# The tracker has this long to do so once those processes are killed.
TRACKER_SECONDS = 0.2
TAG = b"ORCHESTRATOR_RUN="
NO_RUN = ("", 0, 0)
# A run directory; earlier versions had none for each attempt.
RUN_PATH = re.compile(r".*/runs/([^/]+)/([0-9]{1,9})(?:/([0-9]{1,9}))?")

# A job, the number of a node's part of it, and that of an attempt.
Run = tuple[str, int, int]


def processes_of_job(run: PartDir) -> list[Process]:
    """Return all living processes of one node's part of a job, except its supervisor."""
    with contextlib.closing(JobProcesses(run)) as ours:
        return ours.members()


def run_at(path: str) -> Run:
    """Return the run with this directory."""
    found = RUN_PATH.fullmatch(path)
    return (found[1], int(found[2]), int(found[3] or 1)) if found else NO_RUN


def supervised_run(pid: int) -> Run:
    """Return the run that a process supervises.

    The command line `python -IS -Xutf8 <library> supervise JOB PART ATTEMPT` is set from its start.
    """
    words = processes.command_line_of(pid)[-4:]
    if "supervise" not in words[:-2]:
        return NO_RUN
    return run_at("/".join(["", "runs", *words[words.index("supervise") + 1 :]]))


class Look:
    """A snapshot of all processes of this machine, and the run directories that they name."""

    def __init__(self, before: Look | None = None) -> None:
        self.tags: dict[int, str] = dict(before.tags) if before else {}
        known: Mapping[int, Process] = before.running if before else {}
        self.running: dict[int, Process] = processes.all_processes(self.examine, known)

    def examine(self, process: Process) -> bool:
        """Record the process's run; return True if its environment could be read."""
        variables = processes.environment_of(process.pid)
        found = (each.partition(TAG)[2] for each in variables if each.startswith(TAG))
        self.tags.update((process.pid, os.fsdecode(path)) for path in found)
        return bool(variables)

    def of(self, part: Part) -> set[int]:
        """Return the processes that name a run of this part."""
        return {pid for pid, path in self.tags.items() if run_at(path)[:2] == part}

    @functools.cached_property
    def supervisors(self) -> dict[int, Run]:
        """Return the run by supervisor PID, including supervisors that have just started."""
        found = {p.pid: supervised_run(p.pid) for p in self.running.values() if not p.is_dead}
        return {pid: run for pid, run in found.items() if run != NO_RUN}


def living_runs(wanted: Iterable[Part]) -> list[Run]:
    """Return the runs of these parts that have a living process or supervisor here.

    A supervisor's command line counts only if this user owns it: any user can write such a line.
    """
    look = Look()
    alive = {run_at(path) for pid, path in look.tags.items() if pid != os.getpid()}
    alive |= {
        run for pid, run in look.supervisors.items() if processes.owner_of(pid) == os.getuid()
    }
    parts = set(wanted)
    return sorted(run for run in alive if run[:2] in parts)


def runs_here(runs: Iterable[RunDir]) -> list[RunDir]:
    """Return the runs that were started on this machine, or that live on it.

    Machines that share a home see the files of each other's jobs there, but neither processes nor
    sockets. So a machine must not treat another's runs as its own, nor write their last event.
    """
    runs, this_machine = list(runs), machine_name()
    elsewhere = [run for run in runs if (started_on(run) or this_machine) != this_machine]
    # A machine may get another name while a job runs on it.
    alive = living_runs((run.job, run.part) for run in elsewhere) if elsewhere else ()
    others = {(run.job, run.part) for run in elsewhere}.difference(run[:2] for run in alive)
    return [run for run in runs if (run.job, run.part) not in others]


def started_on(run: RunDir) -> str:
    """Return the machine that a run was started on, or "" if its spec does not name one."""
    try:
        return run.read_spec().machine
    except (OSError, ValueError):
        return ""


class JobProcesses(ProcessSet):
    """The processes of a job on this node."""

    def __init__(self, run: PartDir, supervisor: int = 0, owner: int | None = None) -> None:
        super().__init__()
        self.part = (run.job, run.part)
        # The PID of the supervisor if it is the caller; 0 searches for the supervisor.
        self.supervisor = supervisor
        self.owner = os.getuid() if owner is None else owner
        self.supervisors: set[tuple[int, int]] = set()
        self.segments = Segments()

    def find(self) -> list[Process]:
        look = Look()
        supervisors = self.find_supervisors(look)
        self.supervisors |= {process.key for process in supervisors}
        return [*self.family(look, {process.pid for process in supervisors}), *supervisors]

    def members(self) -> list[Process]:
        """Look again; return the processes that are not gone yet, except the supervisor."""
        return [process for process in self.living() if process.key not in self.supervisors]

    def kill(self, wanted: Iterable[Process]) -> dict[int, str]:
        """Kill these processes and the ones they start before they die; return name by PID.

        All are stopped before the first is killed. A late child then still has a parent by which
        it is recognised. A process that forks all the time is caught before its next fork.
        """
        still: list[Process] = []
        tried, supervisors = set(self.supervisors), {pid for pid, _ in self.supervisors}
        look, deadline = Look(), time.monotonic() + CHASE_SECONDS
        while wanted and time.monotonic() < deadline:
            for process in wanted:
                processes.send_signal(process, signal.SIGSTOP)
                still.append(process)
                tried.add(process.key)
            look = Look(look)
            found = self.family(look, supervisors)
            self.add(found)
            wanted = [process for process in found if process.key not in tried]
        doomed = [*still, *wanted]
        self.segments.note(doomed)
        trackers = [p for p in doomed if TRACKER in " ".join(processes.command_line_of(p.pid))]
        killed = kill_all(process for process in doomed if process not in trackers)
        if trackers:
            for process in trackers:
                processes.send_signal(process, signal.SIGCONT)
            processes.wait_for_end(trackers, TRACKER_SECONDS)
            killed.update(kill_all(trackers))
        return killed

    def kill_some(self, doomed: Iterable[Process]) -> dict[int, str]:
        """Kill only these, while others of the job go on; return name by PID."""
        doomed = list(doomed)
        self.segments.note(doomed)
        return kill_all(doomed)

    def find_supervisors(self, look: Look) -> list[Process]:
        """Return the job's supervisor, even if it has just been started."""
        if self.supervisor:
            return []
        return [
            look.running[pid]
            for pid, run in look.supervisors.items()
            if run[:2] == self.part and processes.owner_of(pid) == self.owner
        ]

    def family(self, look: Look, supervisors: set[int]) -> list[Process]:
        """Return the processes with the job's tag, and descendants of those or of known ones."""
        supervising = supervisors | ({self.supervisor} if self.supervisor else set())
        running = without_samplers(look.running, supervising)
        roots = {process.pid for process in running.values() if process.key in self.seen}
        roots |= look.of(self.part) & running.keys()
        ours = (
            (roots | processes.find_descendants(running, roots | supervising))
            - supervising
            - {os.getpid()}
        )
        return [running[pid] for pid in ours if not running[pid].is_dead]


def without_samplers(running: Mapping[int, Process], supervisors: set[int]) -> dict[int, Process]:
    """Return the processes without the samplers of these supervisors, which are not the job's."""
    return {
        pid: process
        for pid, process in running.items()
        if process.parent not in supervisors or processes.command_line_of(pid)[-4:-3] != ["sample"]
    }


def kill_all(doomed: Iterable[Process]) -> dict[int, str]:
    return {p.pid: p.name for p in doomed if processes.send_signal(p, signal.SIGKILL)}


class Tagged(NamedTuple):
    """A job, as found in the environment of its processes or in its supervisor's command line."""

    job: str
    part: int
    attempt: int
    owner: int
    # The directory in which its supervisor listens.
    directory: str


def tagged_jobs() -> set[Tagged]:
    """Return the jobs of all processes that this login may inspect, wherever their files are."""
    jobs, look = set(), Look()
    runs = {pid: (run, "") for pid, run in look.supervisors.items()}
    runs |= {pid: (run_at(path), path) for pid, path in look.tags.items()}
    for pid, (run, directory) in runs.items():
        owner = processes.owner_of(pid)
        if JOB_NAME.fullmatch(run[0]) and owner >= 0:
            jobs.add(Tagged(*run, owner, directory))
    return jobs


# -- shared memory --------------------------------------------------------------------------------

DIRECTORY = b"/dev/shm/"
# Of /proc/PID/maps: addresses, rights, offset, device, inode, path.
MAPPING = re.compile(rb"^\S+ (\S{4}) \S+ (\w+):(\w+) (\d+) +(/dev/shm/.*)$", re.MULTILINE)
SHARED = b"rw-s"

# A key is (device, inode).
Key = tuple[int, int]


class Segments:
    """Shared memory of one job's processes, which killed ones may leave in /dev/shm.

    A segment is recorded if a process that is about to be killed maps it shared and writable. It
    must be newer than the first of these processes: an older file may be a data set, not the
    job's. Once no process maps it, it is removed. The rest is reported.
    """

    def __init__(self) -> None:
        self.noted: dict[Key, str] = {}
        # The Unix time at which the first of the processes began.
        self.since = float("inf")

    def note(self, killed: Iterable[Process]) -> None:
        """Record the segments of these processes, which are stopped or about to be killed."""
        killed = list(killed)
        self.since = min([self.since, *map(processes.start_time, killed)])
        for process in killed:
            owner = processes.owner_of(process.pid)
            for key, path in mapped_files(
                processes.file_contents(f"/proc/{process.pid}/maps"), SHARED
            ):
                status = status_of(path, key)
                if status and status.st_uid == owner and status.st_ctime >= self.since:
                    self.noted[key] = path

    def remove(self) -> tuple[str, ...]:
        """Remove segments of this user that no process maps any more; return the rest."""
        there = {key: path for key, path in self.noted.items() if status_of(path, key)}
        used, hidden = in_use(there) if there else (set(), False)
        for key, path in there.items():
            status = status_of(path, key)
            own = status is not None and status.st_uid == os.getuid()
            # A process that cannot be inspected could map segments that others may open.
            private = status is not None and not (hidden and status.st_mode & 0o077)
            if own and private and key not in used:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        return tuple(sorted(path for key, path in there.items() if status_of(path, key)))


def mapped_files(maps: bytes, rights: bytes = b"") -> Iterator[tuple[Key, str]]:
    """Yield the mappings below /dev/shm, all or only those with these rights."""
    if DIRECTORY in maps:
        for its_rights, major, minor, inode, path in MAPPING.findall(maps):
            if rights in (b"", its_rights):
                device = os.makedev(int(major, 16), int(minor, 16))
                yield (device, int(inode)), os.fsdecode(path)


def status_of(path: str, key: Key) -> os.stat_result | None:
    """Return the status of a regular file if the path still leads to it, else None."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    same = (status.st_dev, status.st_ino) == key and stat.S_ISREG(status.st_mode)
    return status if same else None


def in_use(wanted: Iterable[Key]) -> tuple[set[Key], bool]:
    """Return which of these a process maps, and True if some process cannot be inspected."""
    used: set[Key] = set()
    hidden = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                used |= {key for key, _ in mapped_files(file.read())}
        except PermissionError:
            hidden = True
        except OSError:
            continue
    return used & set(wanted), hidden
