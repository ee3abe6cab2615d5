"""The directory of experiments: create, list and find them."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import EMPTY, UsageError, did_you_mean
from orchestrator.common.permissions import other_writers
from orchestrator.config.launch import Where
from orchestrator.records import trust
from orchestrator.records.experiment import (
    NAME,
    RECORD,
    STAMP,
    Experiment,
    JobRecord,
    Untrusted,
    read_record,
)


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name an experiment",
            "letters, digits, _ . + - are allowed, the first a letter or digit, 100 at most",
        )


def create_experiment(root: Path, name: str) -> Experiment:
    """Create experiments/<name>_YYYYMMDD_HHMMSS, unique even for two launches in one second."""
    check_name(name)
    try:
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            # Another launch may create it first.
            with contextlib.suppress(FileExistsError):
                files.make_private(root)
                files.replace_file(root / ".gitignore", "# experiments are no source\n*\n")
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
        # Of two launches in one second, the second takes the name of the next second.
        with contextlib.suppress(FileExistsError):
            files.make_private(path)
            return path
    raise UsageError(f"all names {name}_... of the next hour are taken in {root}")


def list_experiments(where: Where) -> list[Experiment]:
    """Return all experiments of a directory, the newest last, by the times in their names.

    Experiments that another user may have written are left out, unless they are trusted.
    """
    return [
        Experiment(path, trusted=where.trust_record)
        for path, problem in _entries(where.experiments)
        if where.trust_record or not problem
    ]


def read_record_in(directory: int, name: str, where: Where) -> tuple[JobRecord, bool]:
    """Return the record in an open directory, and whether this login launched or trusts it."""
    record = read_record(directory, Path(name), trusted=where.trust_record)
    return record, where.trust_record or trust.signed_exposure(directory, record.orders) is not None


def unfinished_experiments(where: Where) -> list[tuple[Experiment, JobRecord]]:
    """Return the experiments that are not over by their records, the newest last."""
    found = []
    for experiment in list_experiments(where):
        # An experiment without a readable record has no running job.
        with contextlib.suppress(UsageError):
            found.append((experiment, experiment.read_record()))
    return [(experiment, record) for experiment, record in found if not record.over]


def untrusted_experiments(root: Path) -> list[Untrusted]:
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
        problem = other_writers(status) or other_writers(record)
        if problem:
            # Some file systems report such modes for every file. A signed record is trusted all the
            # same.
            with contextlib.suppress(UsageError):
                Experiment(path).read_record()
                problem = ""
        experiments.append((path, problem))
    return experiments


def find_experiment(where: Where, wanted: str | None) -> Experiment | None:
    """Find an experiment by directory or name. Without a name, return the newest trusted one."""
    if wanted == "":
        raise UsageError("the name of the experiment is empty", EMPTY)
    if wanted is None:
        return next(reversed(list_experiments(where)), None)
    for path in (where.experiments / wanted, Path(wanted)):
        # A symbolic link is followed, because the user named it.
        if (path / RECORD).is_file():
            real = Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()
            return Experiment(real, trusted=where.trust_record)
    return None


def require_experiment(where: Where, wanted: str | None) -> Experiment:
    """Find an experiment as find_experiment() does. Raise UsageError if it does not exist."""
    experiment = find_experiment(where, wanted)
    if experiment is None:
        raise missing_experiment(where, wanted)
    return experiment


def missing_experiment(where: Where, wanted: str | None) -> UsageError:
    """Return the error for an experiment that does not exist, with the closest name.

    A user in a new terminal is often in another directory, so the fix explains where to look.
    """
    which = f" {wanted!r}" * bool(wanted)
    what = f"there is no experiment{which} in {where.experiments.absolute()}"
    names = [candidate.name for candidate in list_experiments(where)]
    if names:
        begun = [f"; did you mean {name!r}?" for name in names if name.startswith(wanted or " ")]
        what += begun[-1] if begun else did_you_mean(wanted or "", names)
        return UsageError(what, f"the newest is {names[-1]}; orchestrator ls shows all")
    return UsageError(
        what,
        "experiments are in the directory where they were launched: go there, or name one by its"
        " path; master_launch SCRIPT starts one",
    )


def experiment_of_slurm_job(root: Path, job: str) -> Experiment | None:
    """Return the newest experiment that was submitted or started as this Slurm job."""
    where = Where(experiments=root.absolute())
    return next((each for each in list_experiments(where)[::-1] if each.slurm_job() == job), None)
