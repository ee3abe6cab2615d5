"""Ends jobs on this node: asks their supervisors, and sweeps up after those that are gone."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import socket
import struct
import time
from functools import partial

from orchestrator.node.job import processes
from orchestrator.node.job.processes import Tagged
from orchestrator.node.job.run_directory import RunDir, all_runs, connect, connect_in
from orchestrator.node.job.stop_receipt import receipt
from orchestrator.protocol import control, events
from orchestrator.protocol.events import Ended, EndOrder
from orchestrator.protocol.messages import Stop, StopAll, StopReceipt
from orchestrator.protocol.timing import SWEEP_PATIENCE

AT_ONCE = 16
GONE = "its supervisor was killed"


def end(run: RunDir, why: str, grace: float) -> None:
    """Ask the supervisor, and do not wait."""
    with contextlib.suppress(OSError), connect(run) as supervisor:
        supervisor.sendall(control.to_line(EndOrder(why=why, grace=grace)))


def stop(run: RunDir, request: Stop | StopAll) -> StopReceipt:
    """Ask the supervisor and wait, or kill what is left where there is none; prove the end."""
    began = time.monotonic()
    before = processes.of_job(run.job, run.node)
    try:
        with connect(run) as supervisor:
            ask_and_wait(supervisor, request)
    except OSError:
        pass  # no supervisor: it has ended, or was killed
    ended = run.last(Ended)
    if ended is not None:
        return receipt(run, began, ended, before, {})
    killed = sweep(run)
    proof = receipt(run, began, None, before, killed)
    if not proof.left and os.path.isdir(run.path):
        why = ": ".join(filter(None, (GONE, last_words(run))))
        last = Ended(
            time=time.time(), agent=None, why=why, killed=killed, left=(), ranks={}, swept=True
        )
        with open(run.events, "a", encoding="utf-8") as file:
            file.write(json.dumps(events.to_data(last)) + "\n")
    return proof


def stop_all(request: StopAll) -> list[StopReceipt]:
    """End every job here of this user, or of all; known by its directory or only by its tag."""
    known = {(run.job, run.node) for run in all_runs() if run.last(Ended) is None}
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
    before = processes.of_job(job.job, job.node)
    try:
        with connect_in(job.directory) as supervisor:
            if peer_of(supervisor) == job.owner:
                ask_and_wait(supervisor, request)
    except OSError:
        pass  # nobody there: the sweep is all that is left to do
    killed = sweep(run)
    return receipt(run, began, None, before, killed).replace(user=name_of(job.owner))


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


def peer_of(connection: socket.socket) -> int:
    """Return the user at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    uid: int = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )[1]
    return uid


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def sweep(run: RunDir) -> dict[int, str]:
    """Kill everything with the job's tag, at once: its supervisor is gone. PID -> name."""
    killed: dict[int, str] = {}
    deadline = time.monotonic() + SWEEP_PATIENCE
    while time.monotonic() < deadline:
        living = processes.of_job(run.job, run.node)
        if not living:
            break
        for process in living:
            if processes.send(process, signal.SIGKILL):
                killed[process.pid] = process.name
        time.sleep(0.02)  # the kernel tells nobody but the parent when a process is gone
    return killed


def last_words(run: RunDir) -> str:
    """Return the error output of a supervisor that ended by a defect of its own."""
    try:
        with open(os.path.join(run.path, "supervisor.err"), "rb") as file:
            return file.read().decode("utf-8", "replace").strip()[-2000:]
    except OSError:
        return ""
