"""Removes files of old jobs on this node, for `orchestrator prune --on-nodes`.

A directory gets a hidden name before it is deleted, so it is whole or gone; the next removal
deletes anything that an interrupted one left under such a name.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence

from orchestrator.common import files
from orchestrator.node.job import job_processes, processes, resume_dir
from orchestrator.node.job.run_directory import PartDir, all_runs, names_in
from orchestrator.protocol.events import Ended
from orchestrator.protocol.requests.follow import RemovedPart, RemovedParts
from orchestrator.protocol.requests.request import Part

# A name with a number is a library that is only partly unpacked.
LIBRARY_NAME = re.compile(r"[0-9a-f]{16}(\.[0-9]+)?")
# The age is counted from the last use by a head.
OLD_LIBRARY_SECONDS = 7 * 86400.0


def remove_parts(wanted: Sequence[Part], library: str) -> RemovedParts:
    """Remove the directories of these parts unless they still run, and libraries without a user."""
    alive = {run[:2] for run in job_processes.living_runs(wanted)}
    parts: list[RemovedPart] = []
    freed: list[int] = []
    for job, part in wanted:
        problem = "it still runs there" if (job, part) in alive else ""
        try:
            if not problem:
                _remove_part(PartDir(job, part), freed.append)
        except (OSError, ValueError) as error:
            problem = processes.error_in_words(error)
        parts.append(RemovedPart(job=job, part=part, problem=problem))
    resume_dir.remove_forgotten(time.time())
    remove_libraries(library, freed.append)
    for directory in (os.path.join(files.our_directory(), each) for each in ("runs", "lib")):
        # An earlier removal may have been interrupted before it deleted these.
        for name in names_in(directory):
            if name.startswith(".") and files.GONE in name:
                files.delete_directory(os.path.join(directory, name), freed.append)
    return RemovedParts(parts=tuple(parts), freed=sum(freed))


def remove_libraries(library: str, seen: Callable[[int], None] = lambda _: None) -> None:
    """Remove all unused libraries except this one."""
    for path in old_libraries(os.path.basename(library), time.time()):
        directory, name = os.path.split(path)
        hidden = os.path.join(directory, files.hidden_name(name))
        # A library that cannot be removed takes little space; the next removal retries it.
        with contextlib.suppress(OSError):
            files.hide_directory(path, hidden)
            files.delete_directory(hidden, seen)


def _remove_part(part: PartDir, seen: Callable[[int], None]) -> None:
    job = os.path.dirname(part.home)
    if os.path.islink(job):
        raise ValueError(f"{job} is not a directory of ours")
    with contextlib.suppress(OSError):
        os.unlink(part.over)
    # The part was removed before, or never existed here.
    if not os.path.lexists(part.home):
        with contextlib.suppress(OSError):
            os.rmdir(job)
        return
    for path in (job, part.home):
        if os.path.islink(path) or not os.path.isdir(path):
            raise ValueError(f"{path} is not a directory of ours")
    mounted = files.mounts_below(part.home)
    if mounted:
        raise ValueError(f"{mounted[0]} is mounted there")
    if not resume_dir.remove_resume_dir(part):
        raise OSError(f"its attempts' files in {resume_dir.resume_roots()} cannot be removed")
    hidden = os.path.join(os.path.dirname(job), files.hidden_name(f"{part.job}.{part.part}"))
    try:
        files.hide_directory(part.home, hidden)
    except FileNotFoundError:
        # Another prune has removed it at the same time.
        return
    with contextlib.suppress(OSError):
        # Nodes that share a home each have a directory in the job's.
        os.rmdir(job)
    problems = files.delete_directory(hidden, seen)
    if problems:
        raise OSError(problems[0])


def old_libraries(current: str, now: float) -> list[str]:
    """Return old versions of the library that no run needs and no head used for a while."""
    used = {current}
    for run in all_runs():
        if run.last(Ended) is not None:
            continue
        try:
            used.add(os.path.basename(run.read_spec().library))
        except (OSError, ValueError):
            # This run may need any of them.
            return []
    directory = os.path.join(files.our_directory(), "lib")
    old = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            ours = LIBRARY_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            if ours and entry.name not in used:
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and now - status.st_mtime > OLD_LIBRARY_SECONDS:
                    old.append(entry.path)
    return old
