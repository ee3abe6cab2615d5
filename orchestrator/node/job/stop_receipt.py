"""Proves that a job is over on this node: no process, no GPU memory, no port of it is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.node.job import processes
from orchestrator.node.job.port import port_is_free
from orchestrator.node.job.processes import Process
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.events import Ended
from orchestrator.protocol.requests.follow import PortState, StopReceipt

GPU_SECONDS = 5.0  # nvidia-smi without its daemon wakes every GPU first
RELEASE_SECONDS = 2.0  # a driver may take as long to give back what a killed process held
NVIDIA = ("--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits")
MACHINE_PIDS = 0xEFFFFFFC  # the inode of the PID namespace that no container has
AMD = "/sys/class/kfd/kfd/proc"  # a directory per process that uses a GPU


class Stopped(NamedTuple):
    """The work of a stop, and the processes that it saw."""

    why: str  # the order's
    began: float  # monotonic
    known: bool  # there was something of the job here
    before: Sequence[Process]  # lived when it began
    killed: dict[int, str]
    left: Sequence[Process]


def receipt(run: RunDir, stopped: Stopped, ended: Ended | None) -> StopReceipt:
    """Say what was ended and how, and what is left."""
    left = {process.pid for process in stopped.left}
    lived = {process.pid: process.name for process in stopped.before}
    killed = dict(stopped.killed)
    ranks: set[int] = set()
    if ended is not None:
        # A stop on another node may have come here first, through the supervisors.
        lived = {**(ended.lived or {} if ended.why == stopped.why else {}), **lived}
        killed = {**ended.killed, **killed}
        ranks = {rank.pid for rank in ended.ranks.values() if rank.pid}
    names = {pid: name for pid, name in lived.items() if pid not in left}
    held, unknown = gpu_memory({*names, *killed, *ranks})
    return StopReceipt(
        job=run.job,
        node=run.node,
        known=stopped.known,
        ended=names,
        killed=killed,
        left=tuple(sorted(left)),
        gpu_memory=held,
        gpu_unknown=unknown,
        port=port_of(run),
        took=time.monotonic() - stopped.began,
    )


def port_of(run: RunDir) -> PortState | None:
    """Look at the master's port, on the master's node: can it be had again?"""
    try:
        number = run.read_spec().port
    except (OSError, ValueError):
        return None
    return PortState(number=number, free=port_is_free(number)) if number else None


def gpu_memory(pids: set[int]) -> tuple[dict[int, str], str]:
    """Return PID -> what it holds, of these PIDs; and why that is not known, or nothing."""
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        try:
            held = {**nvidia_memory(), **amd_memory()}
        except OSError as error:
            return {}, str(error)
        ours = {pid: held[pid] for pid in sorted(pids & set(held)) if not lives_anew(pid)}
        if not ours or time.monotonic() > deadline:
            return ours, ""
        time.sleep(0.1)  # no driver tells when it has finished


def lives_anew(pid: int) -> bool:
    """Does this PID belong to a new process? All processes of the job are dead."""
    now = processes.look(pid)
    return now is not None and now.state not in "ZXD"


def nvidia_memory() -> dict[int, str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    if os.stat("/proc/self/ns/pid").st_ino != MACHINE_PIDS:
        raise OSError("this is a container, and nvidia-smi shows the PIDs of its host")
    text = output([program, *NVIDIA])
    rows = (line.split(",") for line in text.splitlines())
    memory = {}
    for row in rows:
        if row[0].strip().isdigit() and len(row) > 1:
            amount = row[1].strip()
            memory[int(row[0])] = f"{amount} MiB" if amount.isdigit() else "some memory"
    return memory


def output(command: list[str]) -> str:
    """Run a command that may hang in the driver: then not even SIGKILL ends it, and we go on."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        text = process.communicate(timeout=GPU_SECONDS)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        name = os.path.basename(command[0])
        raise OSError(f"{name} did not answer in {GPU_SECONDS:g} s") from None
    if process.returncode:
        first = (text.strip().splitlines() or ["no word"])[0]
        raise OSError(f"{os.path.basename(command[0])} failed: {first}")
    return text


def amd_memory() -> dict[int, str]:
    memory = {}
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir(AMD)):
            used = sum(number(os.path.join(AMD, name, file)) for file in vram_files(name))
            if used:
                memory[int(name)] = f"{used >> 20} MiB"
    return memory


def vram_files(name: str) -> list[str]:
    try:
        return [file for file in os.listdir(os.path.join(AMD, name)) if file.startswith("vram_")]
    except OSError:  # it ended meanwhile
        return []


def number(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
