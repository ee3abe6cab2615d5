"""The directories that the attempts of one job share on a node: on its own disk, and in memory.

Files that ranks write there outlive them; the next attempt finds them by ORCHESTRATOR_RESUME_DIR.
The Trainer keeps its states in ORCHESTRATOR_MEMORY_DIR.
The directories are removed when the job ended well, was stopped or pruned, or its head requests it.
They are also removed if no further attempt has started for an hour.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat

from orchestrator.common import files
from orchestrator.node.job import job_processes
from orchestrator.node.job.run_directory import JOB_NAME, PartDir, RunDir
from orchestrator.protocol.events import Ended

MEMORY = "/dev/shm"
# It is used if the home is on a network disk.
SCRATCH = "/var/tmp"
# The time after the end of a job that was not restarted.
FORGOTTEN_SECONDS = 3600.0
# The age at which files of a job unknown here are removed.
UNKNOWN_SECONDS = 86400.0


def resume_roots() -> tuple[str, str, str]:
    """Return the parents of such directories: in memory, on a disk for scratch, in the home."""
    private = f"orchestrator-{os.getuid()}"
    memory, scratch = (os.path.join(place, private) for place in (MEMORY, SCRATCH))
    return memory, scratch, os.path.join(files.our_directory(), "resume")


def make_resume_dir(part: PartDir, *, in_memory: bool = False) -> str:
    """Create a directory of the job on the node's own disk, or find that of an earlier attempt.

    That in memory is on disk if there is no /dev/shm.
    """
    memory, scratch, home = resume_roots()
    disks = [home, scratch] if files.is_local(files.our_directory()) else [scratch, home]
    for root in [memory, *disks] if in_memory else disks:
        path = os.path.join(root, f"{part.job}.{part.part}")
        with contextlib.suppress(OSError):
            for directory in (root, path):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(directory, 0o700)
            if is_ours(root) and is_ours(path):
                return path
    raise OSError(f"no directory can be made for {part.job} in {' or '.join(disks)}")


def is_ours(path: str) -> bool:
    """Return True for a directory that only this user can enter: any user may create the name."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        private = not stat.S_IMODE(status.st_mode) & 0o077
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and private
    return False


def remove_resume_dir(part: PartDir) -> bool:
    """Remove the files that a job's attempts share; return True if none is left."""
    roots = list(filter(is_ours, resume_roots()))
    places = [os.path.join(root, f"{part.job}.{part.part}") for root in roots]
    gone = [_gone(path) for path in (part.payload, *places)]
    for root in roots:
        with contextlib.suppress(OSError):
            # This succeeds once the last job's directory is gone.
            os.rmdir(root)
    return all(gone)


def _gone(path: str) -> bool:
    # It removes no link.
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


def remove_forgotten(now: float) -> None:
    """Remove files of jobs that ended some time ago and were not restarted."""
    roots = map(glob.escape, filter(is_ours, resume_roots()))
    for path in [path for root in roots for path in glob.glob(os.path.join(root, "*"))]:
        job, _, number = os.path.basename(path).rpartition(".")
        with contextlib.suppress(OSError):
            if not (JOB_NAME.fullmatch(job) and number.isdigit()):
                continue
            part = PartDir(job, int(number))
            ends = [end_of(run) for run in part.attempts()]
            unknown = os.stat(path).st_mtime + UNKNOWN_SECONDS
            if now > max((end + FORGOTTEN_SECONDS for end in ends), default=unknown):
                remove_resume_dir(part)


def end_of(run: RunDir) -> float:
    """Return when a run ended; a lost machine that came back has no last event of it."""
    end = run.last(Ended)
    if end is not None:
        return end.time
    if not job_processes.runs_here([run]) or job_processes.living_runs([(run.job, run.part)]):
        return float("inf")
    return os.stat(run.path).st_mtime
