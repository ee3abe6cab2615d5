"""Ends jobs on this node: asks their supervisors, and kills processes of jobs without one.

A job that has not started never will: a stop writes a mark before it looks (RunDir.forbid_start).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from orchestrator.common.permissions import user_name
from orchestrator.node.job import job_processes, processes, resume_dir
from orchestrator.node.job.job_processes import JobProcesses, Tagged
from orchestrator.node.job.processes import Process
from orchestrator.node.job.run_directory import (
    RunDir,
    all_runs,
    connect_in,
    connect_supervisor,
    note_stop_of_all,
    runs_here,
)
from orchestrator.node.server.ports import port_is_free
from orchestrator.protocol import control
from orchestrator.protocol.events import Ended, EndOrder, Started
from orchestrator.protocol.requests.follow import PortState, Stop, StopAll, StopReceipt
from orchestrator.protocol.requests.request import AttemptRequest
from orchestrator.protocol.timing import DEATH_SECONDS, LAST_WORD_SECONDS, RELEASE_SECONDS

AT_ONCE = 16
GONE = "its supervisor was killed"
# The interval of the looks for processes that were born while others were killed.
KILL_SECONDS = 0.2


def end_part(run: RunDir, order: EndOrder) -> None:
    """Send the supervisor an order to end. A part that has not started yet never will."""
    with contextlib.suppress(OSError):
        run.forbid_start()
    with contextlib.suppress(OSError), connect_supervisor(run) as supervisor:
        supervisor.sendall(control.message_to_line(order))


def stop_part(run: RunDir, request: Stop | StopAll) -> StopReceipt:
    """End a job's part and wait; without a supervisor kill its processes. Return the proof."""
    began = time.monotonic()
    problem: OSError | None = None
    for_good = isinstance(request, StopAll) or request.for_good
    try:
        run.forbid_start(for_good=for_good)
    # The disk may be full.
    except OSError as error:
        problem = error
    with contextlib.closing(JobProcesses(run)) as ours:
        before = ours.members()
        known = bool(ours.seen) or os.path.isdir(run.path)
        # Connecting fails if the supervisor is gone.
        with contextlib.suppress(OSError), connect_supervisor(run) as supervisor:
            ask_and_wait(supervisor, request)
        if run.last(Ended) is not None:
            # The supervisor writes its last event before it ends.
            ours.wait(DEATH_SECONDS)
        killed = kill_rest(ours)
        ended = run.last(Ended)
        if ended is None and problem is not None and run.last(Started) is None:
            # Without the mark, the part could still start.
            raise problem
        left = ours.living()
        if ended is None and not left and os.path.isdir(run.path):
            run.append_event(last_event(run, request.why, killed))
        if for_good and not left:
            resume_dir.remove_resume_dir(run)
        memory = ours.segments.remove()
    proof = make_receipt(run, request.why, before, killed, left, ended)
    memory = (*memory, *(ended.shared_memory if ended else ()))
    return proof.replace(
        known=known,
        shared_memory=tuple(sorted(filter(os.path.lexists, set(memory)))),
        took=time.monotonic() - began,
    )


def last_event(run: RunDir, reason: str, killed: dict[int, str]) -> Ended:
    """Return the last event in place of a supervisor that was killed."""
    begun = run.last(Started) is not None
    words = (GONE, last_words(run)) if begun else ("not started", reason)
    return Ended(
        time=time.time(),
        agent=None,
        why=": ".join(filter(None, words)),
        killed=killed,
        left=(),
        ranks={},
        swept=begun,
    )


def stop_all(request: StopAll) -> list[StopReceipt]:
    """End every job of this user or of all users, even if only its processes are known."""
    if request.only_show:
        shown = (list_processes(job) for job in jobs_here(request))
        return [receipt for receipt in shown if receipt.left]
    with contextlib.suppress(OSError):
        note_stop_of_all()
    work = [
        partial(stop_of_another, job, request)
        if job.owner != os.getuid()
        else partial(stop_part, run_of(job), request)
        for job in jobs_here(request)
    ]
    # The probe does not need this import.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda stopping: stopping(), work))


def jobs_here(request: StopAll) -> list[Tagged]:
    """Return the jobs that a request concerns, those of this user first."""
    us = os.getuid()
    unfinished = job_processes.runs_here(run for run in all_runs() if run.last(Ended) is None)
    jobs = {
        (run.job, run.part): Tagged(run.job, run.part, run.attempt, us, run.path)
        for run in unfinished
    }
    others = {}
    for job in job_processes.tagged_jobs():
        if job.owner == us:
            jobs.setdefault((job.job, job.part), job)
        elif request.all_users:
            others[job.job, job.part] = job
    return [*(jobs[key] for key in sorted(jobs)), *(others[key] for key in sorted(others))]


def run_of(named: Tagged | AttemptRequest[Any]) -> RunDir:
    return RunDir(named.job, named.part, named.attempt)


def list_processes(job: Tagged) -> StopReceipt:
    """Return the living processes of a job without ending any."""
    ours_too = job.owner == os.getuid()
    with contextlib.closing(JobProcesses(run_of(job), owner=job.owner)) as ours:
        left = tuple(sorted(process.pid for process in ours.living()))
    experiment = ""
    if ours_too:
        with contextlib.suppress(OSError, ValueError):
            experiment = run_of(job).read_spec().experiment
    user = "" if ours_too else user_name(job.owner)
    return StopReceipt(job=job.job, part=job.part, left=left, user=user, experiment=experiment)


def stop_of_another(job: Tagged, request: StopAll) -> StopReceipt:
    """End another user's job, as root, without touching their files: links could lead anywhere."""
    began = time.monotonic()
    with contextlib.closing(JobProcesses(run_of(job), owner=job.owner)) as ours:
        before = ours.members()
        with contextlib.suppress(OSError), connect_in(job.directory) as supervisor:
            if processes.peer_user(supervisor) == job.owner:
                ask_and_wait(supervisor, request)
                ours.wait(DEATH_SECONDS)
        killed, left = kill_rest(ours), ours.living()
    memory, user = ours.segments.remove(), user_name(job.owner)
    proof = make_receipt(run_of(job), request.why, before, killed, left, None)
    return proof.replace(user=user, shared_memory=memory, took=time.monotonic() - began)


def ask_and_wait(supervisor: socket.socket, request: Stop | StopAll) -> None:
    supervisor.sendall(control.message_to_line(EndOrder(why=request.why, grace=request.grace)))
    deadline = time.monotonic() + request.wait
    # The supervisor closes its socket when the job has ended.
    while time.monotonic() < deadline:
        supervisor.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            if not supervisor.recv(1 << 16):
                return
        # The time is over; before Python 3.10 a time-out is no TimeoutError.
        except OSError:
            return


def kill_rest(ours: JobProcesses) -> dict[int, str]:
    """Kill a job's processes at once, and wait until they are gone; return name by PID."""
    killed: dict[int, str] = {}
    alive = ours.living()
    # Taken after the first look, which is slow on a busy machine and kills nothing.
    began = time.monotonic()
    while alive:
        now = time.monotonic()
        # The supervisor is killed last: it inherits orphans, and may still report how all ended.
        others = [process for process in alive if process.key not in ours.supervisors]
        spared = DEATH_SECONDS / 2 if others else last_word_seconds(alive)
        last = now - began >= spared
        killed.update(ours.kill(alive if last else others))
        if last and now - began >= DEATH_SECONDS:
            break
        ours.wait(KILL_SECONDS)
        alive = ours.living()
    return killed


def last_word_seconds(supervisors: Sequence[Process]) -> float:
    """Return the seconds supervisors may take for their last event; 0 if they are stopped."""
    now = (processes.find_process(process.pid) for process in supervisors)
    speaks = any(process is not None and process.state not in "Tt" for process in now)
    return LAST_WORD_SECONDS if speaks else 0.0


def last_words(run: RunDir) -> str:
    """Return the error output of a supervisor that crashed."""
    try:
        with open(os.path.join(run.path, "supervisor.err"), "rb") as file:
            return file.read().decode("utf-8", "replace").strip()[-2000:]
    except OSError:
        return ""


# Without its daemon, nvidia-smi first initialises every GPU.
GPU_SECONDS = 5.0
# The inode of the machine's own PID namespace; no container has it.
MACHINE_PIDS = 0xEFFFFFFC


def make_receipt(
    run: RunDir,
    reason: str,
    before: Sequence[Process],
    killed: dict[int, str],
    left: Sequence[Process],
    ended: Ended | None,
) -> StopReceipt:
    """Return the receipt: which processes lived before, how they ended, and which are left."""
    remaining = {process.pid for process in left}
    lived = {process.pid: process.name for process in before}
    ranks: set[int] = set()
    if ended is not None:
        # A stop on another node may have ended this part before, through the supervisors.
        lived = {**(ended.lived or {} if ended.why == reason else {}), **lived}
        killed = {**ended.killed, **killed}
        ranks = {rank.pid for rank in ended.ranks.values() if rank.pid}
    names = {pid: name for pid, name in lived.items() if pid not in remaining}
    held, unknown = gpu_memory({*names, *killed, *ranks})
    return StopReceipt(
        job=run.job,
        part=run.part,
        runs=runs_here(),
        ended=names,
        killed=killed,
        left=tuple(sorted(remaining)),
        gpu_memory=held,
        gpu_unknown=unknown,
        port=port_of(run),
    )


def port_of(run: RunDir) -> PortState | None:
    """Return the state of the master's port, on the master's node."""
    try:
        spec = run.read_spec()
        number = 0 if spec.node else spec.port
    except (OSError, ValueError):
        return None
    return PortState(number=number, free=port_is_free(number)) if number else None


def gpu_memory(pids: set[int]) -> tuple[dict[int, str], str]:
    """Return the GPU memory held, by PID, of these PIDs; and the reason if it is unknown."""
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        try:
            held = nvidia_memory()
        except OSError as error:
            return {}, str(error)
        ours = {pid: held[pid] for pid in sorted(pids & set(held)) if not is_new(pid)}
        if not ours or time.monotonic() > deadline:
            return ours, ""
        # No driver reports when it has freed the memory.
        time.sleep(0.1)


def is_new(pid: int) -> bool:
    """Return True if this PID belongs to a new process: all processes of the job are dead."""
    now = processes.find_process(pid)
    return now is not None and now.state not in "ZXD"


def nvidia_memory() -> dict[int, str]:
    # Only a stop needs this import.
    from orchestrator.node.machine import nvidia

    if shutil.which("nvidia-smi") is None:
        return {}
    if os.stat("/proc/self/ns/pid").st_ino != MACHINE_PIDS:
        raise OSError("this is a container, and nvidia-smi shows the PIDs of its host")
    found, problem = nvidia.computing_processes(GPU_SECONDS)
    if problem:
        raise OSError(problem)
    holders = ((holder.pid, holder.used) for holder in found)
    return {pid: "some memory" if used is None else f"{used >> 20} MiB" for pid, used in holders}
