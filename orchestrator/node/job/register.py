"""The register of what a job has started on this node: processes.json, beside its events.

A process with an environment of its own is known by its descent from the supervisor alone, and
its descent is unknown once the supervisor was killed. So the supervisor, to which all orphans
of the job fall while it lives, writes down what descends from it: a stop that finds no supervisor
has this. What was born after the last look is doubtful: the control group and the time say which
orphans it may be, by the clock that cannot be set. Where the login may make a control group of its
own (cgroup v2), the job is in one, and nothing is doubtful: the kernel knows what was started in
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping

from orchestrator.node.job import processes
from orchestrator.node.job.processes import Process
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.message import Message, Nonsense, decode, encode, parse

SET_SECONDS = 1.0  # a clock that goes back by more was set
LOOK_SECONDS = 1.0  # between two looks
SHARE = 0.01  # of a core at most goes into looking
TICKS = os.sysconf("SC_CLK_TCK")
TICK_SECONDS = 2 / TICKS  # the start of a process is known to a tick
GROUP = re.compile(r"orchestrator-(.+)-([0-9]+)")


class Known(Message):
    """The processes of a job, as its supervisor saw them last."""

    boot: str
    group: str  # control group
    processes: tuple[tuple[int, int], ...]  # PID and start time
    read_at: float = 0.0  # seconds since the boot
    own_group: str = ""  # the directory of a control group that all of them are in

    def living(self) -> list[Process]:
        """Return those that live."""
        there = filter(None, (processes.find(pid) for pid, _ in self.processes))
        return [p for p in there if p.key in self.processes and not p.is_dead]


class Register:
    """The register of a job, as its supervisor keeps it."""

    def __init__(self, run: RunDir) -> None:
        self.path = run.register
        self.names = (run.job, str(run.node))
        self.group = ""  # the directory of the job's own control group
        self.due = 0.0
        self.written: set[tuple[int, int]] | None = None
        self.spec = run.spec
        self.booted = time.time() - since_boot()  # by the clock that can be set

    def turn(self) -> float:
        """Look when it is time; return the seconds until the next look."""
        began = time.monotonic()
        if began >= self.due:
            self.check()
            now = time.monotonic()
            self.due = now + max(LOOK_SECONDS, (now - began) / SHARE)
        return max(0.0, self.due - time.monotonic())

    def check(self) -> None:
        """Write down what descends from this process, where there is anything new.

        The file's time is that of the look, by the clock of the boot.
        """
        looked_at = since_boot()
        self.notice_clock(looked_at)
        running = without_samplers(processes.everyone(), {os.getpid()})
        now = {running[pid].key for pid in processes.descendants(running, [os.getpid()])}
        with contextlib.suppress(OSError):  # a full disk: the last one stays, with its time
            if self.written is not None and now <= self.written:
                os.utime(self.path, (looked_at, looked_at))
                return
            inside = (
                self.group and now and all(self.names in jobs_in(group(str(pid))) for pid, _ in now)
            )
            own = self.group if inside else ""
            keys = tuple(sorted(now))
            known = Known(boot=boot(), group=group(), processes=keys, own_group=own)
            with open(os.open(f"{self.path}.new", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.truncate()
                json.dump(encode(known), file)
            os.utime(f"{self.path}.new", (looked_at, looked_at))
            os.replace(f"{self.path}.new", self.path)
            self.written = now

    def notice_clock(self, now: float) -> None:
        """Set the job's start back with the clock: what it writes from then on is not older."""
        before, self.booted = self.booted, time.time() - now
        if before - self.booted > SET_SECONDS:
            with contextlib.suppress(OSError):
                began = os.stat(self.spec).st_mtime - (before - self.booted)
                os.utime(self.spec, (began, began))


def without_samplers(running: Mapping[int, Process], supervisors: set[int]) -> dict[int, Process]:
    """Leave out the children of supervisors that sample the machine, and are no part of the job."""
    return {
        pid: process
        for pid, process in running.items()
        if process.parent not in supervisors or processes.words_of(pid)[-3:-2] != ["sample"]
    }


def read(run: RunDir) -> Known | None:
    """Return what the supervisor of a run saw last, since this machine was booted."""
    known = written(run)
    return known if known and known.boot == boot() else None


def is_of_another_boot(run: RunDir) -> bool:
    """Return True if a run began before this machine was booted: nothing of it can live."""
    known = written(run)
    return bool(known and known.boot != boot())


def written(run: RunDir) -> Known | None:
    try:
        with open(run.register, "rb") as file:
            known = decode(Known, parse(file.read()), newer=True)
            return known.replace(read_at=os.fstat(file.fileno()).st_mtime)
    except (OSError, Nonsense):
        return None


def remove(run: RunDir, own_group: str) -> None:
    """Remove the register of a run of which nothing is left, and its control group."""
    with contextlib.suppress(OSError):
        os.rmdir(own_group)
    with contextlib.suppress(OSError):
        os.unlink(run.register)


# -- the control group of a job ---------------------------------------------------------------


def path_of(groups: str) -> str:
    """Return the path of the group of version 2 among the groups of a process, or nothing."""
    return next((line[3:] for line in groups.splitlines() if line.startswith("0::")), "")


def jobs_in(groups: str) -> list[tuple[str, str]]:
    """Return the runs (job and node) in whose control groups a process with these groups is."""
    found = (GROUP.fullmatch(name) for name in path_of(groups).split("/"))
    return [(match[1], match[2]) for match in found if match]


def make_group(run: RunDir) -> str:
    """Make a control group for a run below that of this process; return its path, or nothing."""
    path = os.path.join(own_group(), f"orchestrator-{run.job}-{run.node}")
    try:
        os.mkdir(path)
    except OSError:  # this login may not, or there is no cgroup v2
        return ""
    return path


def own_group() -> str:
    """Return the directory of this process's control group of version 2, or one that is not."""
    path = path_of(group())
    mounts = processes.contents("/proc/self/mountinfo").decode("utf-8", "replace").splitlines()
    for words in (line.split() for line in mounts if " - cgroup2 " in line):
        root, point = words[3].rstrip("/"), words[4]
        directory = point + path[len(root) :] if path.startswith(root) else point
        inside = processes.contents(os.path.join(directory, "cgroup.procs")).split()
        if b"%d" % os.getpid() in inside:
            return directory
    return os.devnull


def kill_group(path: str) -> None:
    """Kill all of a group at once, where the kernel can (5.14), so nothing is born during it."""
    with contextlib.suppress(OSError), open(os.path.join(path, "cgroup.kill"), "w") as file:
        file.write("1")


def boot() -> str:
    return processes.contents("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip()


def since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def group(process: str = "self") -> str:
    return processes.contents(f"/proc/{process}/cgroup").decode("utf-8", "replace")


def orphans(since: float, of_group: str, owner: int) -> list[Process]:
    """Return processes without a parent, begun since then in a group, which may be of a job.

    `since`: seconds since the boot. What runs for a login is left out: a server of SSH is an
    orphan as well. What began before its time namespace seems to begin in the far future.
    """
    now = since_boot()
    since = since if since <= now else 0.0  # of another clock: it may be anything
    may_be: set[int] = set()

    def examine(process: Process) -> bool:
        begun = process.started / TICKS
        if not since - TICK_SECONDS < begun < since_boot() + TICK_SECONDS:
            return True
        its_group = group(str(process.pid))
        if its_group == of_group and owner in (0, processes.owner_of(process.pid)):
            may_be.add(process.pid)
        return bool(its_group)

    running = processes.everyone(examine)
    ours, pid = {os.getpid()}, os.getpid()
    while pid in running:
        pid = running[pid].parent
        ours.add(pid)
    candidates = (running[pid] for pid in may_be - ours)
    return [
        process
        for process in candidates
        if (process.parent == 1 or running.get(process.parent, process).name == "systemd")
        and not process.name.startswith("sshd")
    ]
