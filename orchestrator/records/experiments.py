"""The directory of experiments: create, list and find them."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import EMPTY, UsageError, nearest
from orchestrator.common.permissions import others
from orchestrator.records.experiment import (
    NAME,
    RECORD,
    STAMP,
    Experiment,
    Untrusted,
)


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name an experiment",
            "letters, digits, _ . + - are allowed, the first a letter or digit, 100 at most",
        )


def create(root: Path, name: str) -> Experiment:
    """Create experiments/<name>_YYYYMMDD_HHMMSS, unique even for two launches in one second."""
    check_name(name)
    try:
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            # Another launch may create it first.
            with contextlib.suppress(FileExistsError):
                files.make_private(root)
                files.replace(root / ".gitignore", "# experiments are no source\n*\n")
        path = _new_directory(root.absolute(), name)
        for inner in (path / "outputs", path / "logs"):
            files.make_private(inner)
    except OSError as error:
        raise UsageError(
            f"no experiment can be created in {root}: {error.strerror}",
            "make it writable, free some space, or name another directory with --experiments DIR",
        ) from error
    return Experiment(path)


def _new_directory(root: Path, name: str) -> Path:
    now = time.time()
    for later in range(3600):
        path = root / f"{name}_{time.strftime('%Y%m%d_%H%M%S', time.localtime(now + later))}"
        try:
            files.make_private(path)
        except FileExistsError:
            # Of two launches in one second, the second takes the name of the next second.
            continue
        return path
    raise UsageError(f"all names {name}_... of the next hour are taken in {root}")


def stamped(stamp: str) -> float | None:
    """Return the Unix time of a stamp in the name of an experiment, or None if it is no time."""
    try:
        return time.mktime(time.strptime(stamp, "%Y%m%d_%H%M%S"))
    except (ValueError, OverflowError):
        return None


def every(root: Path, *, trusted: bool = False) -> list[Experiment]:
    """Return all experiments under a root, the newest last, by the times in their names.

    Unless `trusted`, experiments that another user may have written are left out.
    """
    return [
        Experiment(path, trusted=trusted)
        for path, problem in _entries(root)
        if trusted or not problem
    ]


def unfinished(root: Path, *, trusted: bool = False) -> list[Experiment]:
    """Return the experiments that are not over by their records, the newest last."""

    def is_unfinished(experiment: Experiment) -> bool:
        try:
            return not experiment.read_record().over
        except UsageError:
            # An experiment without a readable record has no running job.
            return False

    return list(filter(is_unfinished, every(root, trusted=trusted)))


def passed_over(root: Path) -> list[Untrusted]:
    """Return an error for each experiment that is skipped because others may have written it."""
    return [Untrusted(path, problem) for path, problem in _entries(root) if problem]


def _entries(root: Path) -> list[tuple[Path, str]]:
    """Return each directory with a record, and why it is not trusted (or ""), newest last."""
    try:
        entries = [entry for entry in root.iterdir() if STAMP.fullmatch(entry.name)]
    except (OSError, ValueError):
        return []
    # An experiment of a clock that was ahead would otherwise stay the newest until that time.
    tomorrow = time.strftime("%Y%m%d_%H%M%S", time.localtime(time.time() + 86400))
    experiments = []
    for path in sorted(entries, key=lambda p: (p.name[-15:] <= tomorrow, p.name[-15:])):
        try:
            status, record = path.lstat(), (path / RECORD).lstat()
        except OSError:
            continue
        if not (stat.S_ISDIR(status.st_mode) and stat.S_ISREG(record.st_mode)):
            continue
        problem = others(status) or others(record)
        if problem:
            # Some file systems report such modes for every file. A signed record is trusted all the
            # same.
            with contextlib.suppress(UsageError):
                Experiment(path).read_record()
                problem = ""
        experiments.append((path, problem))
    return experiments


def find(root: Path, wanted: str | None, *, trusted: bool = False) -> Experiment | None:
    """Find an experiment by directory or name. Without a name, return the newest trusted one.

    The machines of a job that was started by hand may share a disk. Without a name, this machine's
    part then precedes the parts of others.
    """
    if wanted == "":
        raise UsageError("the name of the experiment is empty", EMPTY)
    if wanted is None:
        known = every(root, trusted=trusted)[::-1]
        return next(
            (candidate for candidate in known if not candidate.elsewhere),
            known[0] if known else None,
        )
    for path in (root / wanted, Path(wanted)):
        try:
            # A symbolic link is followed, because the user named it.
            there = (path / RECORD).is_file()
        except PermissionError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except OSError:
            # For example, the name is too long for a file.
            continue
        if there:
            real = Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()
            return Experiment(real, trusted=trusted)
    return None


def known(root: Path, wanted: str | None, *, trusted: bool = False) -> Experiment:
    """Find an experiment as find() does. Raise UsageError if it does not exist."""
    experiment = find(root, wanted, trusted=trusted)
    if experiment is None:
        raise missing(root, wanted)
    return experiment


def missing(root: Path, wanted: str | None) -> UsageError:
    """Return the error for an experiment that does not exist, with the closest name.

    A user in a new terminal is often in another directory, so the fix explains where to look.
    """
    what = f"no experiment {wanted!r}" if wanted else "no experiment"
    what = f"there is {what} in {root.absolute()}"
    names = [candidate.name for candidate in every(root)]
    if names:
        begun = [name for name in names if wanted and name.startswith(wanted)]
        near = f"; did you mean {begun[-1]!r}?" if begun else nearest(wanted or "", names)
        return UsageError(what + near, f"the newest is {names[-1]}; orchestrator ls shows all")
    return UsageError(
        what,
        "experiments are in the directory where they were launched: go there, or name one by its"
        " path; master_launch SCRIPT starts one",
    )


def of_slurm_job(root: Path, job: str) -> Experiment | None:
    """Return the newest experiment that was submitted or started as this Slurm job."""
    for candidate in reversed(every(root)):
        if candidate.slurm_job() == job:
            return Experiment(candidate.path.absolute())
    return None
