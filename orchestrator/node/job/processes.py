"""Find the processes of a job on this node, and end exactly those.

A process is ours when its environment carries the job's tag, or when it descends from the job's
supervisor (a child may have scrubbed its environment). A PID alone is never trusted: every signal
goes through a pidfd whose start time was checked, so a reused PID cannot be hit.
"""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

from orchestrator.node.job.run_directory import JOB_NAME


class Process(NamedTuple):
    pid: int
    started: int  # clock ticks since boot: with the PID, this identifies one process forever
    parent: int
    state: str
    name: str


def look(pid: int) -> Process | None:
    """Return the process that has a PID now, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    # The name stands in parentheses and may hold spaces and parentheses itself.
    name = text[text.index("(") + 1 : text.rindex(")")]
    fields = text[text.rindex(")") + 2 :].split()
    return Process(pid, int(fields[19]), int(fields[1]), fields[0], name)


def catches(pid: int, signum: int) -> bool:
    """Tell whether a process has a handler of its own for a signal."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            caught = next(line for line in file if line.startswith(b"SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def everyone() -> dict[int, Process]:
    running = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            process = look(int(entry))
            if process is not None:
                running[process.pid] = process
    return running


def environment(pid: int) -> set[bytes]:
    """Return the environment a process was started with; empty if we may not look."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()


def of_job(job: str, node: int, supervisor: int = 0) -> list[Process]:
    """Return all living processes of one job on one node, except the supervisor itself."""
    tags = {f"ORCHESTRATOR_JOB={job}".encode(), f"NODE_RANK={node}".encode()}
    processes = everyone()
    roots = {pid for pid in processes if tags <= environment(pid)}
    # A descendant belongs to the job even if it left its session and cleared its environment.
    ours = roots | _descendants(processes, roots | ({supervisor} if supervisor else set()))
    return [
        process
        for process in processes.values()
        if process.pid in ours
        and process.state not in "ZX"
        and process.pid not in {supervisor, os.getpid()}
    ]


class Tagged(NamedTuple):
    """A job, as found in the environment of its processes."""

    job: str
    node: int
    owner: int
    directory: str  # where its supervisor listens


def tagged_jobs() -> set[Tagged]:
    """Find the jobs of all processes that we may look into, wherever their files are."""
    jobs = set()
    for pid in everyone():
        tags = dict(entry.partition(b"=")[::2] for entry in environment(pid))
        job, node = os.fsdecode(tags.get(b"ORCHESTRATOR_JOB", b"")), tags.get(b"NODE_RANK", b"")
        owner = _owner(pid)
        if JOB_NAME.fullmatch(job) and node.isdigit() and owner >= 0:
            run = os.fsdecode(tags.get(b"ORCHESTRATOR_RUN", b""))
            jobs.add(Tagged(job, int(node), owner, run))
    return jobs


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:  # it has ended in the meantime
        return -1


def _descendants(processes: dict[int, Process], roots: set[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    descendants: set[int] = set()
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in descendants:
                descendants.add(child)
                queue.append(child)
    return descendants


def send(process: Process, signum: int) -> bool:
    """Signal exactly this process; False if it is gone or not ours to signal."""
    try:
        fd = os.pidfd_open(process.pid)
    except (OSError, AttributeError):
        return _send_without_pidfd(process, signum)
    try:
        now = look(process.pid)
        if now is None or now.started != process.started:
            return False
        signal.pidfd_send_signal(fd, signum)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _send_without_pidfd(process: Process, signum: int) -> bool:
    """Check, then signal, in two steps: for kernels before 5.3."""
    now = look(process.pid)
    if now is None or now.started != process.started:
        return False
    try:
        os.kill(process.pid, signum)
    except OSError:
        return False
    return True


def alive(process: Process) -> bool:
    now = look(process.pid)
    return now is not None and now.started == process.started and now.state not in "ZX"
