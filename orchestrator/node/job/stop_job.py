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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from orchestrator.node.job import processes
from orchestrator.node.job.processes import Tagged
from orchestrator.node.job.run_directory import RunDir, all_runs, connect, connect_in
from orchestrator.node.job.stop_receipt import receipt

SWEEP_SECONDS = 10.0
AT_ONCE = 16
GONE = "its supervisor was killed"


def end(run: RunDir, words: dict[str, Any]) -> dict[str, Any]:
    """Tell the supervisor, or kill what is left where there is none; the receipt."""
    began = time.monotonic()
    before = processes.of_job(run.job, run.node)
    try:
        with connect(run) as supervisor:
            ask(supervisor, words)
    except OSError:
        pass  # no supervisor: it has ended, or was killed
    ended = run.last_event("ended")
    if ended is not None:
        return receipt(run, began, ended, before, {})
    killed = sweep(run)
    found = receipt(run, began, None, before, killed)
    if not found["left"] and os.path.isdir(run.path):
        why = ": ".join(filter(None, (GONE, last_words(run))))
        last = {"event": "ended", "time": time.time(), "agent": None, "why": why}
        with open(run.events, "a", encoding="utf-8") as file:
            file.write(json.dumps({**last, "swept": True, "killed": killed, "left": []}) + "\n")
    return found


def end_all(words: dict[str, Any]) -> list[dict[str, Any]]:
    """Every job here of this user, or of all users; known by its directory or only by its tag."""
    known = {(run.job, run.node) for run in all_runs() if run.last_event("ended") is None}
    tagged = processes.tagged_jobs()
    known |= {(one.job, one.node) for one in tagged if one.owner == os.getuid()}
    work = [partial(end, RunDir(job, node), words) for job, node in sorted(known)]
    if words.get("all_users"):
        others = {(one.job, one.node): one for one in tagged if one.owner != os.getuid()}
        work += [partial(end_of_another, others[key], words) for key in sorted(others)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda one: one(), work))


def end_of_another(job: Tagged, words: dict[str, Any]) -> dict[str, Any]:
    """As root. Nothing in another user's files is read or written: they could lead anywhere."""
    began = time.monotonic()
    run = RunDir(job.job, job.node)
    before = processes.of_job(job.job, job.node)
    try:
        with connect_in(job.directory) as supervisor:
            if peer_of(supervisor) == job.owner:
                ask(supervisor, words)
    except OSError:
        pass  # nobody there: the sweep is all that is left to do
    killed = sweep(run)
    return {**receipt(run, began, None, before, killed), "user": name_of(job.owner)}


def tell(run: RunDir, words: dict[str, Any]) -> None:
    """Ask the supervisor, and do not wait."""
    with contextlib.suppress(OSError), connect(run) as supervisor:
        send(supervisor, words)


def send(supervisor: socket.socket, words: dict[str, Any]) -> None:
    line = json.dumps({"why": words["why"], "grace": words["grace"]})
    supervisor.sendall(line.encode() + b"\n")


def ask(supervisor: socket.socket, words: dict[str, Any]) -> None:
    send(supervisor, words)
    deadline = time.monotonic() + words["wait"]
    while time.monotonic() < deadline:  # it closes its socket when it is done
        supervisor.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            if not supervisor.recv(1 << 16):
                return
        except OSError:  # too late; before Python 3.10 a time-out is no TimeoutError
            return


def peer_of(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    found: int = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )[1]
    return found


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def sweep(run: RunDir) -> dict[int, str]:
    """Kill everything with the job's tag, at once: its supervisor is gone. PID -> name."""
    killed: dict[int, str] = {}
    deadline = time.monotonic() + SWEEP_SECONDS
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
    """Of a supervisor that ended by a defect of its own."""
    try:
        with open(os.path.join(run.path, "supervisor.err"), "rb") as file:
            return file.read().decode("utf-8", "replace").strip()[-2000:]
    except OSError:
        return ""
