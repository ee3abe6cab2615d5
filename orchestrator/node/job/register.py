"""The register of what a job has started on this node: processes.json, beside its events.

A process with an environment of its own is known by its descent from the supervisor alone, and
nobody can tell its descent once the supervisor was killed. So the supervisor, to which all orphans
of the job fall while it lives, writes down what descends from it: a stop that finds no supervisor
has this. What was born after the last look is doubtful: the control group and the time say which
orphans it may be.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping

from orchestrator.node.job import processes
from orchestrator.node.job.processes import Process
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.message import Message, Nonsense, decode, encode, parse

LOOK_SECONDS = 1.0  # between two looks
SHARE = 0.01  # of a core at most goes into looking
CLOCK_SECONDS = 0.1  # a file's time is that much behind
TICKS = os.sysconf("SC_CLK_TCK")


class Known(Message):
    """The processes of a job, as its supervisor saw them last."""

    boot: str
    group: str  # control group
    processes: tuple[tuple[int, int], ...]  # PID and start time
    read_at: float = 0.0  # Unix time

    def living(self) -> list[Process]:
        """Return those that live."""
        there = [processes.find(pid) for pid, _ in self.processes]
        pairs = zip(self.processes, there)  # noqa: B905  Python 3.9
        return [
            process
            for key, process in pairs
            if process is not None and process.key == key and not process.is_dead
        ]


class Register:
    """The register of a job, as its supervisor keeps it."""

    def __init__(self, run: RunDir) -> None:
        self.path = run.register
        self.due = 0.0
        self.written: set[tuple[int, int]] = set()

    def turn(self) -> float:
        """Look when it is time; return the seconds until the next look."""
        began = time.monotonic()
        if began >= self.due:
            self.check()
            now = time.monotonic()
            self.due = now + max(LOOK_SECONDS, (now - began) / SHARE)
        return max(0.0, self.due - time.monotonic())

    def check(self) -> None:
        """Write down what descends from this process, where there is anything new."""
        running = without_samplers(processes.everyone(), {os.getpid()})
        now = {running[pid].key for pid in processes.descendants(running, [os.getpid()])}
        with contextlib.suppress(OSError):  # a full disk: the last one stays, with its time
            if now <= self.written:
                os.utime(self.path)
                return
            known = Known(boot=boot(), group=group(), processes=tuple(sorted(now)))
            with open(os.open(f"{self.path}.new", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.truncate()
                json.dump(encode(known), file)
            os.replace(f"{self.path}.new", self.path)
            self.written = now


def without_samplers(running: Mapping[int, Process], supervisors: set[int]) -> dict[int, Process]:
    """Leave out the children of supervisors that sample the machine, and are no part of the job."""
    return {
        pid: process
        for pid, process in running.items()
        if process.parent not in supervisors or processes.words_of(pid)[-3:-2] != ["sample"]
    }


def read(run: RunDir) -> Known | None:
    """Return what the supervisor of a run saw last, since this machine was booted."""
    try:
        with open(run.register, "rb") as file:
            known = decode(Known, parse(file.read()), newer=True)
            read_at = os.fstat(file.fileno()).st_mtime
    except (OSError, Nonsense):
        return None
    return known.replace(read_at=read_at) if known.boot == boot() else None


def remove(run: RunDir) -> None:
    """Remove the register of a run of which nothing is left."""
    with contextlib.suppress(OSError):
        os.unlink(run.register)


def boot() -> str:
    return processes.contents("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip()


def group(process: str = "self") -> str:
    return processes.contents(f"/proc/{process}/cgroup").decode("utf-8", "replace")


def orphans(since: float, of_group: str, owner: int) -> list[Process]:
    """Return processes without a parent, begun since then in a group, which may be of a job.

    What runs for a login is left out: a server of SSH is an orphan, too. What began before its
    time namespace seems to begin in the far future.
    """
    running = processes.everyone()
    now = time.time()
    booted = now - time.clock_gettime(time.CLOCK_BOOTTIME)
    ours, pid = {os.getpid()}, os.getpid()
    while pid in running:
        pid = running[pid].parent
        ours.add(pid)
    return [
        process
        for process in running.values()
        if since - CLOCK_SECONDS < booted + process.started / TICKS < now + CLOCK_SECONDS
        and not process.is_dead
        and process.pid not in ours
        and (process.parent == 1 or running.get(process.parent, process).name == "systemd")
        and not process.name.startswith("sshd")
        and owner in (0, processes.owner_of(process.pid))
        and group(str(process.pid)) == of_group
    ]
