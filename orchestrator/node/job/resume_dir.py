"""The directory that the attempts of one job share on a node, in memory where there is /dev/shm.

Files that ranks write there outlive them; the next attempt finds them by ORCHESTRATOR_RESUME_DIR.
The directory is removed when the job ended well, was stopped or pruned, or its head requests it. It
is also removed if no further attempt has started for an hour.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat

from orchestrator.node.job import job_processes
from orchestrator.node.job.run_directory import JOB_NAME, RunDir, all_runs
from orchestrator.protocol.events import Ended

MEMORY = "/dev/shm"
# The time after the end of a job that was not restarted.
FORGOTTEN_SECONDS = 3600.0
# The age at which files of a job unknown here are removed.
UNKNOWN_SECONDS = 86400.0


def resume_root() -> str:
    return os.path.join(MEMORY, f"orchestrator-{os.getuid()}")


def first_attempt_of(run: RunDir) -> RunDir | None:
    """Return this machine's part of the first attempt, or None if the job has no attempts."""
    with contextlib.suppress(OSError, ValueError):
        attempt = run.read_spec().attempt
        if attempt is not None:
            return RunDir(attempt.first_job, attempt.first_node)
    return None


def make_resume_dir(first: RunDir) -> str:
    """Create the directory or find that of an earlier attempt; on disk if there is no /dev/shm."""
    name = f"{first.job}.{first.node}"
    for parent in (resume_root(), os.path.join(first.path, "resume")):
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                os.makedirs(parent, mode=0o700)
            if is_ours(parent):
                path = os.path.join(parent, name)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, 0o700)
                if is_ours(path):
                    return path
    raise OSError(f"no directory can be made for {name} in {MEMORY} or {first.path}")


def is_ours(path: str) -> bool:
    """Return True for a directory that only this user can enter: any user may create the name."""
    status = os.lstat(path)
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and not stat.S_IMODE(status.st_mode) & 0o077
    )


def remove_resume_dir(run: RunDir) -> bool:
    """Remove the files that the attempts of this run's job share; return True if none is left."""
    first = first_attempt_of(run) or run
    places = [first.payload, os.path.join(first.path, "resume")]
    ours = False
    with contextlib.suppress(OSError):
        ours = is_ours(resume_root())
    if ours:
        places.append(os.path.join(resume_root(), f"{first.job}.{first.node}"))
    gone = [_gone(path) for path in places]
    if ours:
        with contextlib.suppress(OSError):
            # This succeeds once the last job's directory is gone.
            os.rmdir(resume_root())
    return all(gone)


def _gone(path: str) -> bool:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


def remove_forgotten(now: float) -> None:
    """Remove files of jobs that ended some time ago and were not restarted."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(resume_root()) if is_ours(resume_root()) else []
    for name in names:
        job, _, node = name.rpartition(".")
        path = os.path.join(resume_root(), name)
        with contextlib.suppress(OSError):
            if not (JOB_NAME.fullmatch(job) and node.isdigit()):
                continue
            # The names of later attempts have a number appended.
            named = re.compile(rf"{re.escape(job)}(\.[0-9]+)?").fullmatch
            ends = [end_of(run) for run in all_runs() if named(run.job)]
            unknown = os.stat(path).st_mtime + UNKNOWN_SECONDS
            if now > max((end + FORGOTTEN_SECONDS for end in ends), default=unknown):
                remove_resume_dir(RunDir(job, int(node)))


def end_of(run: RunDir) -> float:
    """Return when a run ended; a lost machine that came back has no last event of it."""
    end = run.last(Ended)
    if end is not None:
        return end.time
    if not job_processes.runs_here([run]) or job_processes.living_runs([(run.job, run.node)]):
        return float("inf")
    return os.stat(run.path).st_mtime
