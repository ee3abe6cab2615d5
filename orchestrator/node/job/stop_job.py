"""Ends jobs on this node: asks their supervisors, and sweeps up after those that are gone.

What has not started yet never will: a stop leaves a mark before it looks (RunDir.forbid_start).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import time
from functools import partial

from orchestrator.node.job import processes
from orchestrator.node.job.attempts import resume_dir
from orchestrator.node.job.processes import JobProcesses, Tagged
from orchestrator.node.job.run_directory import (
    RunDir,
    all_runs,
    connect,
    connect_in,
    note_stop_of_all,
)
from orchestrator.node.job.stop_receipt import Stopped, receipt
from orchestrator.protocol import control
from orchestrator.protocol.events import Ended, EndOrder, Started
from orchestrator.protocol.requests.follow import Stop, StopAll, StopReceipt
from orchestrator.protocol.timing import SWEEP_PATIENCE

AT_ONCE = 16
GONE = "its supervisor was killed"
LAST_WORD_SECONDS = 2.0
KILL_SECONDS = 0.2  # between two looks whether something was born while others were killed


def end(run: RunDir, why: str, grace: float) -> None:
    """Ask the supervisor, and do not wait. What has not started yet is not going to."""
    with contextlib.suppress(OSError):
        run.forbid_start()
    with contextlib.suppress(OSError), connect(run) as supervisor:
        supervisor.sendall(control.to_line(EndOrder(why=why, grace=grace)))


def stop(run: RunDir, request: Stop | StopAll) -> StopReceipt:
    """Ask the supervisor and wait, or kill what is left where there is none; prove the end."""
    began = time.monotonic()
    problem = forbid_start(run)
    first = resume_dir.first_of(run) if isinstance(request, StopAll) or request.for_good else None
    if first is not None:
        with contextlib.suppress(OSError):  # a full disk: its head hears of the end of this one
            first.forbid_attempts()
    ours = JobProcesses(run.job, run.node)
    before = ours.ranks()
    known = bool(ours.seen) or os.path.isdir(run.path)
    with contextlib.suppress(OSError), connect(run) as supervisor:  # else it is gone, or not there
        ask_and_wait(supervisor, request)
    if run.last(Ended) is not None:
        ours.wait(SWEEP_PATIENCE)  # its last word comes before its own end
    killed = sweep(ours)
    ended = run.last(Ended)
    if ended is None and problem is not None and run.last(Started) is None:
        raise problem  # it could still start
    left = ours.living()
    if ended is None and not left and os.path.isdir(run.path):
        run.append_event(last_event(run, request.why, killed))
    if first is not None and not left:
        resume_dir.remove(first)
    ours.close()
    return receipt(run, Stopped(request.why, began, known, before, killed, left), ended)


def forbid_start(run: RunDir) -> OSError | None:
    """Leave the mark; return why that cannot be, on a full disk."""
    try:
        run.forbid_start()
    except OSError as error:
        return error
    return None


def last_event(run: RunDir, why: str, killed: dict[int, str]) -> Ended:
    """Return what a supervisor that was killed can no longer say."""
    begun = run.last(Started) is not None
    words = (GONE, last_words(run)) if begun else ("not started", why)
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
    """End every job here of this user, or of all; known by its directory or only by its tag."""
    with contextlib.suppress(OSError):
        note_stop_of_all()
    unfinished = processes.here(run for run in all_runs() if run.last(Ended) is None)
    known = {(run.job, run.node) for run in unfinished}
    tagged = processes.tagged_jobs()
    known |= {(job.job, job.node) for job in tagged if job.owner == os.getuid()}
    work = [partial(stop, RunDir(job, node), request) for job, node in sorted(known)]
    if request.all_users:
        others = {(job.job, job.node): job for job in tagged if job.owner != os.getuid()}
        work += [partial(stop_of_another, others[key], request) for key in sorted(others)]
    from concurrent.futures import ThreadPoolExecutor  # not for the probe

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda stopping: stopping(), work))


def stop_of_another(job: Tagged, request: StopAll) -> StopReceipt:
    """End another user's job, as root, without touching their files: links could lead anywhere."""
    began = time.monotonic()
    run = RunDir(job.job, job.node)
    ours = JobProcesses(job.job, job.node, owner=job.owner)
    before = ours.ranks()
    with contextlib.suppress(OSError), connect_in(job.directory) as supervisor:
        if processes.peer(supervisor).uid == job.owner:
            ask_and_wait(supervisor, request)
            ours.wait(SWEEP_PATIENCE)
    killed = sweep(ours)
    left = ours.living()
    ours.close()
    proof = receipt(run, Stopped(request.why, began, True, before, killed, left), None)
    return proof.replace(user=name_of(job.owner))


def ask_and_wait(supervisor: socket.socket, request: Stop | StopAll) -> None:
    supervisor.sendall(control.to_line(EndOrder(why=request.why, grace=request.grace)))
    deadline = time.monotonic() + request.wait
    while time.monotonic() < deadline:  # it closes its socket when it is done
        supervisor.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            if not supervisor.recv(1 << 16):
                return
        except OSError:  # too late; before Python 3.10 a time-out is no TimeoutError
            return


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def sweep(ours: JobProcesses) -> dict[int, str]:
    """Kill what lives of a job, at once, and wait until it is gone. PID -> name."""
    killed: dict[int, str] = {}
    began = time.monotonic()
    while ours.living() and time.monotonic() - began < SWEEP_PATIENCE:
        # Its supervisor may still say how all the others have ended.
        spared = time.monotonic() - began < LAST_WORD_SECONDS
        for process in ours.ranks() if spared else ours.living():
            if processes.send(process, signal.SIGKILL):
                killed[process.pid] = process.name
        ours.wait(KILL_SECONDS)
    return killed


def last_words(run: RunDir) -> str:
    """Return the error output of a supervisor that ended by a defect of its own."""
    try:
        with open(os.path.join(run.path, "supervisor.err"), "rb") as file:
            return file.read().decode("utf-8", "replace").strip()[-2000:]
    except OSError:
        return ""
