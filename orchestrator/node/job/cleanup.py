"""What jobs left on this node: which of them still run, and taking away what the others left.

link.py calls it for `orchestrator prune`. A directory gets a hidden name before it is deleted, so
it is whole or gone; what an interruption left under such a name goes the next time.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from typing import Any

from orchestrator.node.job import processes
from orchestrator.node.job.run_directory import RunDir, all_runs, home

GONE = ".gone-"
LIBRARY_NAME = re.compile(r"[0-9a-f]{16}(\.[0-9]+)?")  # with a number: half unpacked
OLD_LIBRARY = 7 * 86400.0  # seconds since a link last came from it


def living(wanted: Iterable[Any]) -> list[list[Any]]:
    """Those [job, node] of which anything lives here: a process with its tag, or its supervisor."""
    found: set[tuple[bytes | None, bytes | None] | None] = set()
    for process in processes.everyone().values():
        if process.state in "ZX" or process.pid == os.getpid():
            continue
        tags = dict(entry.partition(b"=")[::2] for entry in processes.environment(process.pid))
        found.add((tags.get(b"ORCHESTRATOR_JOB"), tags.get(b"NODE_RANK")))
        found.add(_supervised(process.pid))
    return [
        [job, node]
        for job, node in wanted
        if (os.fsencode(str(job)), str(node).encode("ascii", "replace")) in found
    ]


def _supervised(pid: int) -> tuple[bytes, bytes] | None:
    """Whose supervisor it is: `python -IS <library> supervise JOB NODE`."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return None
    return (words[-3], words[-2]) if words[-4:-3] == [b"supervise"] else None


def remove(wanted: list[Any], library: str) -> dict[str, Any]:
    """The directories of these runs, those that run excepted, and libraries that nobody needs."""
    alive = living(wanted)
    runs, freed = [], 0
    for job, node in wanted:
        problem = "it still runs there" if [job, node] in alive else ""
        try:
            freed += 0 if problem else _remove_run(_run(job, node))
        except (OSError, ValueError) as error:
            problem = str(error)
        runs.append({"job": job, "node": node, "problem": problem})
    old = old_libraries(os.path.basename(library), time.time())
    for path in [*old, *_interrupted("runs"), *_interrupted("lib")]:
        with contextlib.suppress(OSError):  # it costs little and stays until the next time
            freed += _delete(path if GONE in os.path.basename(path) else _hide(path))
    return {"runs": runs, "freed": freed, "libraries": len(old)}


def _run(job: Any, node: Any) -> RunDir:
    """They come from a file that anybody may have written."""
    if not isinstance(job, str) or type(node) is not int or node < 0:
        raise ValueError(f"not a job and its node: {job!r}, {node!r}")
    return RunDir(job, node)


def _remove_run(run: RunDir) -> int:
    job = os.path.dirname(run.path)
    if not os.path.lexists(run.path):
        return 0  # removed before, or never here
    for path in (job, run.path):
        if os.path.islink(path) or not os.path.isdir(path):
            raise ValueError(f"{path} is not a directory of ours")
    mounted = mounts_below(run.path)
    if mounted:
        raise ValueError(f"{mounted[0]} is mounted there")
    try:
        hidden = _hide(run.path, f".{run.job}.{run.node}{GONE}", os.path.dirname(job))
    except FileNotFoundError:
        return 0  # another prune was faster
    with contextlib.suppress(OSError):
        os.rmdir(job)  # nodes that share their home each have a directory in it
    return _delete(hidden)


def _hide(path: str, name: str = "", where: str = "") -> str:
    directory, own = os.path.split(path)
    name = (name or f".{own}{GONE}") + secrets.token_hex(4)
    hidden = os.path.join(where or directory, name)
    os.rename(path, hidden)
    return hidden


def _delete(path: str) -> int:
    size = _size(path)
    shutil.rmtree(path, ignore_errors=True)  # another prune may be at it too
    if os.path.lexists(path):
        shutil.rmtree(path)  # says what is in the way
    return size


def _size(path: str) -> int:
    found = 0
    for directory, inner, files in os.walk(path):
        for name in [*inner, *files]:
            with contextlib.suppress(OSError):
                found += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return found


def _interrupted(kind: str) -> list[str]:
    """What an earlier removal had no time to delete."""
    directory = os.path.join(home(), kind)
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [os.path.join(directory, n) for n in names if n.startswith(".") and GONE in n]


def old_libraries(own: str, now: float) -> list[str]:
    """Versions of our program that no run here needs and no link has used for a while."""
    used = {own}
    for run in all_runs():
        if any(event.get("event") == "ended" for event in run.read_events()):
            continue
        try:
            used.add(os.path.basename(run.read_spec()["library"]))
        except (OSError, ValueError, KeyError, TypeError):
            return []  # one that may need any of them
    directory = os.path.join(home(), "lib")
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            ours = LIBRARY_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            if ours and entry.name not in used:
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and now - status.st_mtime > OLD_LIBRARY:
                    found.append(entry.path)
    return found


def mounts_below(path: str) -> list[str]:
    """What lies in a mounted file system is not ours to delete."""
    inside = os.path.realpath(path)
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            fields = [line.split()[4] for line in file]
    except (OSError, IndexError):
        return []
    octal = re.compile(rb"\\([0-7]{3})")
    points = [os.fsdecode(octal.sub(lambda m: bytes([int(m[1], 8)]), one)) for one in fields]
    return [point for point in points if point == inside or point.startswith(inside + "/")]
