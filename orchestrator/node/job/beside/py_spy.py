"""Asks py-spy, where it is installed, in which lines the Pythons of a rank are.

For those that answer no signal: a program below a shell script, one that is stopped or waits in the
kernel, a worker that loads data. The answer has the form in which Python writes stacks itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.node.job.processes import Process

NAME = "py-spy"
MOST = 4  # Pythons of one rank, the oldest first


def program(python: str) -> str | None:
    """Return py-spy of the job's environment, or else the one on the path."""
    return shutil.which(NAME, path=os.path.dirname(python)) or shutil.which(NAME)


def pythons(rank: int, processes: Sequence[Process]) -> list[Process]:
    """Return the process of a rank and those below it, as far as they are Pythons."""
    below = {rank}
    for process in sorted(processes, key=lambda process: (process.started, process.pid)):
        if process.parent in below:
            below.add(process.pid)
    found = [process for process in processes if process.pid in below and is_python(process.pid)]
    return sorted(found, key=lambda process: process.started)[:MOST]


def is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def stacks(asked: str, wanted: Sequence[Process], seconds: float) -> dict[int, str]:
    """Return the stacks of these processes that py-spy can tell within so many seconds."""
    running = {
        process: subprocess.Popen(
            [asked, "dump", "--nonblocking", "--json", "--pid", str(process.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for process in wanted
    }
    deadline = time.monotonic() + seconds
    found = {}
    for process, dump in running.items():
        try:
            said, _ = dump.communicate(timeout=max(0.0, deadline - time.monotonic()))
            found[process.pid] = "".join(lines(process, json.loads(said)))
        except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
            dump.kill()
            dump.communicate()
    return found


def lines(process: Process, threads: list[dict[str, Any]]) -> Iterator[str]:
    """Write stacks as faulthandler does, the main thread last."""
    yield f"Process {process.pid} ({process.name}), as {NAME} sees it:\n"
    for thread in sorted(threads, key=lambda thread: thread["os_thread_id"] == process.pid):
        yield f"Thread 0x{int(thread['thread_id']):016x} (most recent call first):\n"
        for frame in thread["frames"]:
            yield f'  File "{frame["filename"]}", line {int(frame["line"])} in {frame["name"]}\n'
