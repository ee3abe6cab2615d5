"""Publish, find, verify and remove the checkpoints of a directory.

The module does not import torch: ranks and the head use it. A checkpoint is whole or absent, even
after a power failure. Its files are written into a hidden directory, the manifest with their
checksums last, and one rename publishes it. Deletion does the same steps in reverse.

Where nodes share no disk, each may hold a part: the manifest, the same on all nodes, and some of
the files. It is whole if each file is on some node (records/checkpoint_parts.py).

    step_00000120/                   published: manifest.json and the files that it lists
    best                             link to the best by a metric: never pruned
    .step_00000120.<token>.partial/  being written, or left by a crash: never taken
    .step_00000120.<token>.gone/     being deleted
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import JobFailed, UsageError, did_you_mean
from orchestrator.common.files import (
    AS_USUAL,
    delete_directory,
    expand_home,
    hide_directory,
    replace_file,
    sync_directory,
)
from orchestrator.config.launch import Where
from orchestrator.records import checkpoint_manifest, experiments
from orchestrator.records.checkpoint_manifest import FileRecord, Manifest, describe_file, shown_name

__all__ = ["Checkpoint", "FileRecord", "Manifest", "describe_file", "shown_name"]

STEP = re.compile(r"step_([0-9]{8,18})")
HIDDEN = re.compile(r"\.step_([0-9]{8,18})\.(.+)\.(partial|gone)", re.DOTALL)
# Relative to the directory of an experiment.
CHECKPOINTS = Path("outputs/checkpoints")
BEST = "best"
ELSEWHERE = "if checkpoint.directory was set, name that directory"


@dataclass(frozen=True)
class Checkpoint(Manifest):
    """One directory step_NNNNNNNN, as its manifest describes it; without files if it has none."""

    path: Path = Path()
    # Why it cannot be used. Empty if all files are present with their sizes.
    problem: str = ""
    # True if its only problem is that some files are on other nodes.
    part: bool = False

    @property
    def complete(self) -> bool:
        return not self.problem

    @property
    def size(self) -> int:
        return sum(record.size for record in self.files.values())


# -- names ------------------------------------------------------------------------------------


def final_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def partial_path(directory: Path, step: int, token: str) -> Path:
    """Return the directory in which a checkpoint is written. Each run has its own token."""
    return directory / f".step_{step:08d}.{token}.partial"


def _gone(directory: Path, step: int) -> Path:
    return directory / f".step_{step:08d}.{secrets.token_hex(4)}.gone"


# -- writing ----------------------------------------------------------------------------------


def write_manifest(
    partial: Path, directory: Path, manifest: Manifest, listed: Sequence[str]
) -> None:
    """Write the manifest beside the files of this node, which are `listed`."""
    step, files = manifest.step, {name: manifest.files[name] for name in listed}
    text = checkpoint_manifest.manifest_to_json(manifest)
    with _saving(directory, step):
        problem = checkpoint_manifest.unfit_names(manifest.files)
        problem = problem or ("" if files else "it has no files")
        problem = problem or checkpoint_manifest.first_problem(
            checkpoint_manifest.size_problems(partial, files)
        )
        if problem:
            raise JobFailed(f"the checkpoint of step {step} is not published: {problem}")
        replace_file(partial / checkpoint_manifest.NAME, text, AS_USUAL)
        _close_to_others(partial, [checkpoint_manifest.NAME, *files])
        sync_directory(partial)


def put_in_place(partial: Path, directory: Path, step: int) -> Path:
    """Publish a partial directory that has a manifest. It replaces an older one of that step."""
    target = final_path(directory, step)
    with _saving(directory, step):
        if target.is_symlink() or (os.path.lexists(target) and not load_checkpoint(target).files):
            raise JobFailed(f"{shown_name(target)} already exists, and is not a checkpoint")
        old = _gone(directory, step)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        sync_directory(directory)
        delete_directory(old)
    return target


def _saving(directory: Path, step: int) -> contextlib.AbstractContextManager[None]:
    return _as_job_failure(
        f"the checkpoint of step {step} could not be saved in {shown_name(directory)}"
    )


def _close_to_others(partial: Path, names: Sequence[str]) -> None:
    """Remove the write permissions of group and others that a loose umask has left."""
    for path in (partial, *(partial / name for name in names)):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)


def mark_best(directory: Path, step: int) -> None:
    """Point the link `best` at a published step, atomically."""
    with _as_job_failure(f"{shown_name(directory / BEST)} could not be moved to step {step}"):
        new = directory / f".{BEST}.{secrets.token_hex(4)}"
        new.symlink_to(final_path(directory, step).name, target_is_directory=True)
        new.replace(directory / BEST)
        sync_directory(directory)


@contextlib.contextmanager
def _as_job_failure(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobFailed(f"{what}: {error.strerror or error}") from error


# -- finding ----------------------------------------------------------------------------------


def list_checkpoints(directory: Path) -> list[Checkpoint]:
    """Return all checkpoints of a directory, newest first, including those with a problem."""
    steps = {step: path for step, kind, path in _entries(directory) if kind == "final"}
    return [load_checkpoint(steps[step]) for step in sorted(steps, reverse=True)]


def _entries(directory: Path) -> list[tuple[int, str, Path]]:
    """Return (step, kind, path) of every directory with a name of this layout, without links."""
    try:
        with os.scandir(directory) as listing:
            entries = [entry.name for entry in listing if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{shown_name(directory)} cannot be read: {reason}") from error
    ours = []
    for name in entries:
        if (plain := STEP.fullmatch(name)) and name == f"step_{int(plain[1]):08d}":
            ours.append((int(plain[1]), "final", directory / name))
        elif hidden := HIDDEN.fullmatch(name):
            ours.append((int(hidden[1]), hidden[3], directory / name))
    return ours


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the manifest of one checkpoint. `problem` is set if it cannot be used."""
    named = STEP.fullmatch(path.name) or HIDDEN.fullmatch(path.name)
    step = int(named[1]) if named else 0
    manifest, part = Manifest(step, created=0.0, progress=None, world=0, files={}), False
    try:
        read = checkpoint_manifest.read_manifest(path)
        if named and read.step != step:
            raise ValueError(f"belongs to step {read.step}")
    except FileNotFoundError:
        problem = f"there is no {checkpoint_manifest.NAME}"
    except OSError as error:
        problem = f"{checkpoint_manifest.NAME} cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        problem = f"{checkpoint_manifest.NAME} {error}"
    else:
        manifest, problems = read, checkpoint_manifest.size_problems(path, read.files)
        away = [name for name in problems if not os.path.lexists(path / name)]
        part = bool(read.hosts) and 0 < len(away) == len(problems) < len(read.files)
        problem = checkpoint_manifest.first_problem(problems)
    if part:
        where = ", ".join(sorted({shown_name(manifest.hosts.get(name, "?")) for name in away}))
        problem = f"{len(away)} of its {len(manifest.files)} files are elsewhere, from {where}"
    return Checkpoint(**vars(manifest), path=path, problem=problem, part=part)


def verify_checkpoint(
    checkpoint: Checkpoint,
    only: Sequence[str] | None = None,
    seen: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Read every byte and return the problems. `only` restricts it to some files.

    seen() is called with the size of each file after it is read.
    """
    if not checkpoint.files:
        return [checkpoint.problem]
    problems = []
    for name in checkpoint.files if only is None else only:
        record = checkpoint.files[name]
        problem = checkpoint_manifest.size_problem(checkpoint.path, name, record)
        if not problem:
            try:
                if describe_file(checkpoint.path / name) != record:
                    problem = f"{shown_name(name)} is damaged: its sha256 is not the manifest's"
            except OSError as error:
                problem = f"{shown_name(name)} cannot be read: {error.strerror}"
        problems += [problem] if problem else []
        seen(record.size)
    return problems


def resolve_checkpoints(text: str | None, root: Path = Path("experiments")) -> list[Checkpoint]:
    """Return the checkpoints that a user means: newest first, never empty.

    `text` is a step's directory, a directory of checkpoints, or an experiment by directory or name.
    None stands for the newest experiment that has a checkpoint.
    """
    known = experiments.list_experiments(Where(experiments=root))
    if text is None:
        for candidate in reversed(known):
            if checkpoints := newest_first(
                list_checkpoints((candidate.path / CHECKPOINTS).absolute())
            ):
                return checkpoints
        raise UsageError(f"no experiment in {shown_name(root)} has a checkpoint", ELSEWHERE)
    plain = Path(expand_home(text))
    places = dict.fromkeys(path.absolute() for path in (root / plain, plain))
    tried = [path for place in places for path in (place, place / CHECKPOINTS)]
    for path in tried:
        checkpoint = load_checkpoint(path)
        if checkpoint.files or (STEP.fullmatch(path.name) and path.is_dir()):
            return [checkpoint]
        if checkpoints := newest_first(list_checkpoints(path)):
            return checkpoints
    there = any(path.exists() for path in tried)
    hint = "" if there else did_you_mean(text, [candidate.name for candidate in known])
    raise UsageError(
        f"there is no checkpoint in {text!r}{hint}",
        f"looked in {', '.join(map(shown_name, tried))}; {ELSEWHERE}",
    )


def newest_first(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Sort by the time of saving, the last first: an earlier run may have higher steps."""
    return sorted(checkpoints, key=lambda each: (each.created, each.step), reverse=True)


# -- removing ---------------------------------------------------------------------------------


def prune_checkpoints(
    directory: Path,
    keep: int,
    is_ours: Callable[[Checkpoint], bool] = lambda checkpoint: True,
    counts: Callable[[Checkpoint], bool] = lambda checkpoint: checkpoint.complete,
) -> list[Path]:
    """Remove all but the newest `keep` complete checkpoints (at least one); return their paths.

    A checkpoint's age is its time of saving: a run that went back saves lower steps than before.
    The best checkpoint stays. A checkpoint with a problem does not count towards `keep`. A
    directory without a manifest may belong to another program, and stays.
    """
    checkpoints = newest_first(filter(is_ours, list_checkpoints(directory)))
    best = directory / BEST
    kept = [at for at, checkpoint in enumerate(checkpoints) if counts(checkpoint)][: max(keep, 1)]
    old = [
        checkpoint
        for checkpoint in reversed(checkpoints[kept[-1] + 1 :] if kept else [])
        if checkpoint.files and not (best.exists() and best.samefile(checkpoint.path))
    ]
    with _as_job_failure(f"old checkpoints in {shown_name(directory)} could not be removed"):
        _remove(directory, [(checkpoint.step, checkpoint.path) for checkpoint in old])
    return [checkpoint.path for checkpoint in old]


def remove_interrupted(directory: Path, token: str) -> None:
    """Remove the hidden directories of interrupted runs, except those with this run's token."""
    with _as_job_failure(f"leftovers of a crash in {shown_name(directory)} could not be removed"):
        old = [
            (step, path)
            for step, kind, path in _entries(directory)
            if kind != "final" and path.name != f".step_{step:08d}.{token}.partial"
        ]
        _remove(directory, old)


def discard_partial(partial: Path, step: int) -> None:
    """Remove a directory that this run has begun to write."""
    if partial.exists():
        _remove(partial.parent, [(step, partial)])


def _remove(directory: Path, old: Sequence[tuple[int, Path]]) -> None:
    """Rename each to a hidden name, then delete: an interruption leaves no half of a checkpoint."""
    for step, path in old:
        gone = _gone(directory, step)
        hide_directory(path, gone)
        # A file in use stays until the next remove_interrupted().
        delete_directory(gone)
