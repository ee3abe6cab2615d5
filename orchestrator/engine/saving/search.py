"""Finds the states that a training can resume from, on disk and in memory of all nodes.

A directory that all ranks see counts for every node. records/checkpoint_parts.py combines the parts
that nodes have of one state. The state that was saved last comes first.
"""

from __future__ import annotations

import glob
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from orchestrator.common.errors import CheckFailed, OrchestratorError, UsageError
from orchestrator.common.files import is_local
from orchestrator.common.permissions import other_writers
from orchestrator.common.text import Say
from orchestrator.engine.ranks.ranks import Ranks, gather_values
from orchestrator.engine.saving.ownership import TrainingRun, run_of
from orchestrator.protocol.timing import SEEN_WITHIN_SECONDS
from orchestrator.records import checkpoint_manifest, checkpoint_parts, checkpoint_store
from orchestrator.records.checkpoint_manifest import FileRecord
from orchestrator.records.checkpoint_parts import CheckpointCandidate, Holding
from orchestrator.records.checkpoint_store import Checkpoint

# Takes a checkpoint's progress; raises CheckFailed if this program cannot use it.
Accept = Callable[[Any], None]
Find = Callable[[], list[Checkpoint]]


@dataclass(frozen=True)
class Found:
    """The candidates, newest first, equal on all ranks."""

    candidates: list[CheckpointCandidate]
    # True if all ranks see one directory on disk.
    shared: bool
    # Checkpoints on this node's disk without a valid manifest.
    unusable: list[Checkpoint]


def all_checkpoints(
    find: Find | None,
    memory: Path | None,
    run: TrainingRun,
    ranks: Ranks,
    say: Say,
    *,
    disk_alone: bool,
) -> Found:
    """Return the checkpoints that find() returns, and this program's states in memory.

    If there are states in memory, checkpoints on disk count only if they are of the same training.
    Without any, checkpoints on disk count only with `disk_alone`. Every rank has to call it.
    """
    checkpoints, shared = agree_on_checkpoints(find) if find is not None else ([], True)
    node = ranks.nodes[ranks.rank][0]
    held = [holding for each in checkpoints if (holding := held_of(each, node))]
    nodes = {number for number, _ in ranks.nodes} if shared else {node}
    on_disk = [replace(holding, node=number) for holding in held for number in nodes]
    first = ranks.rank == ranks.neighbours[0]
    in_memory, strange = kept_in(memory, run, node) if memory and first else ([], "")
    answers = gather_values((in_memory, strange, on_disk if first and not shared else []))
    kept = [holding for some, _, _ in answers for holding in some]
    if not shared:
        on_disk = [holding for _, _, some in answers for holding in some]
    if kept or not disk_alone:
        runs = {holding.run for holding in kept}
        on_disk = [holding for holding in on_disk if holding.run in runs]
    if not kept and (strange := next((text for _, text, _ in answers if text), "")):
        say(f"what is in memory is skipped: {strange}")
    return Found(
        checkpoint_parts.list_candidates([*on_disk, *kept]),
        shared,
        unusable=[each for each in checkpoints if not each.files],
    )


def kept_in(memory: Path, run: TrainingRun, node: int) -> tuple[list[Holding], str]:
    """Return this program's states in this node's memory, or why those that exist do not count."""
    states = checkpoint_store.list_checkpoints(memory) if not why_unfit(memory.parent) else []
    own = []
    for state in states:
        other = run_of(state.progress) or TrainingRun()
        if (other.program, other.model) == (run.program, run.model):
            own.append(state)
    held = [replace(holding, in_memory=True) for each in own if (holding := held_of(each, node))]
    return held, "it is of another program or model" if states and not own else ""


def why_unfit(where: Path) -> str:
    """Return why states cannot be kept below a directory, or an empty string."""
    try:
        status = where.lstat()
    except OSError as error:
        return f"{where}: {error.strerror}"
    if not where.is_dir() or where.is_symlink():
        return f"{where} is not a directory"
    who = other_writers(status)
    return f"{where} {who}" if who else ""


def held_of(checkpoint: Checkpoint, node: int) -> Holding | None:
    """Return the part of a checkpoint that this node has, or None without a manifest."""
    if not checkpoint.files:
        return None
    try:
        manifest = (checkpoint.path / checkpoint_manifest.NAME).read_bytes()
    except OSError:
        return None
    here = frozenset(
        name
        for name, record in checkpoint.files.items()
        if not checkpoint_manifest.size_problem(checkpoint.path, name, record)
    )
    run, own = run_of(checkpoint.progress), FileRecord(len(manifest), sha256(manifest).hexdigest())
    return Holding(
        node,
        checkpoint.step,
        checkpoint.save,
        checkpoint.created,
        own.sha256,
        {**checkpoint.files, checkpoint_manifest.NAME: own},
        here | {checkpoint_manifest.NAME},
        checkpoint.hosts,
        str(checkpoint.path),
        run=run.id if run else "",
    )


def agree_on_checkpoints(find: Find) -> tuple[list[Checkpoint], bool]:
    """Return this rank's checkpoints, and True if all ranks see the same complete ones."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while True:
        checkpoints, problem = [], ""
        try:
            checkpoints = find()
        except OrchestratorError as error:
            problem = str(error)
        digest = sha256(repr(sorted(map(checkpoint_stamp, checkpoints))).encode()).digest()
        parts = any(checkpoint.part for checkpoint in checkpoints)
        late = time.monotonic() > deadline or any(is_local(each.path) for each in checkpoints)
        answers = gather_values((problem, digest, parts, late))
        if all(trouble for trouble, _, _, _ in answers):
            raise CheckFailed(answers[0][0])
        if any(parts for _, _, parts, _ in answers):
            return checkpoints, False
        if all(other == digest for _, other, _, _ in answers):
            return checkpoints, True
        # On a shared disk, a file may appear a moment later.
        if any(late for _, _, _, late in answers):
            return checkpoints, False
        time.sleep(0.05)


def checkpoint_stamp(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """Return values that differ between checkpoints on two disks, even if these are copies."""
    manifest = checkpoint.path / checkpoint_manifest.NAME
    changed = manifest.stat().st_mtime_ns if manifest.exists() else 0
    return checkpoint.step, checkpoint.created, str(checkpoint.path), changed


# -- the searches ----------------------------------------------------------------------------------


def search_of_path(path: str, local: Path | None = None) -> Find:
    """Return a search of a step, a directory of steps, or an experiment.

    A node that shares no disk with the head searches what jobs of the experiment left on it, beside
    the run that saves into `local`.
    """

    def find() -> list[Checkpoint]:
        try:
            return checkpoint_store.resolve_checkpoints(path)
        except UsageError:
            left = [
                each
                for place in left_here(path, local)
                for each in checkpoint_store.list_checkpoints(place)
            ]
            if not left:
                raise
            return left

    return find


def left_here(name: str, local: Path | None) -> list[Path]:
    """Return the directories in which jobs of an experiment left checkpoints on this node."""
    run = local.parent.parent if local is not None else Path()
    name = Path(name).name
    if run.name != "experiment" or not name:
        return []
    pattern = f"{glob.escape(name)}-*/*/experiment/outputs/checkpoints"
    return [
        *sorted(run.parent.parent.parent.glob(pattern)),
        *([local] if local is not None else []),
    ]


def search_for_newest(directory: Path, *, searches: bool, accept: Accept, say: Say) -> Find:
    """Return a search of a directory and, with `searches`, of earlier runs of the same name.

    Checkpoints of other programs do not count, because programs share the name by default.
    """
    # find() may be called several times, and reports each directory once.
    mentioned: set[Path] = set()

    def find() -> list[Checkpoint]:
        checkpoints: list[Checkpoint] = []
        for place in [directory, *earlier_runs(directory)] if searches else [directory]:
            checkpoints = checkpoint_store.list_checkpoints(place)
            reason = reason_against(checkpoints, accept) if searches else ""
            if checkpoints and not reason:
                break
            if checkpoints and place not in mentioned:
                mentioned.add(place)
                say(f"the checkpoints in {place} are skipped: {reason}")
            checkpoints = []
        return checkpoints

    return find


def earlier_runs(directory: Path) -> list[Path]:
    """Return the checkpoint directories of earlier experiments of this name, newest first.

    A node that shares no disk has its own: runs/<experiment>-<id>/<node>/experiment.
    """
    run, inner = directory.parent.parent, "outputs/checkpoints"
    if run.name == "experiment":
        run, inner = run.parent.parent, "*/experiment/outputs/checkpoints"
    same_name = re.fullmatch(r"(.+)_\d{8}_\d{6}(-\w+)?", run.name)
    if same_name is None:
        return []
    pattern = f"{glob.escape(same_name[1])}_[0-9]*_[0-9]*"
    others = sorted(run.parent.glob(pattern), reverse=True)
    return [path for other in others if other != run for path in other.glob(inner)]


def reason_against(checkpoints: Iterable[Checkpoint], accept: Accept) -> str:
    """Return why they are not this program's, or "". One with a damaged manifest passes."""
    try:
        for checkpoint in checkpoints:
            if checkpoint.progress is not None:
                accept(checkpoint.progress)
    except CheckFailed as error:
        return error.what
    return ""


# -- what is refused ------------------------------------------------------------------------------


def refuse_unreadable(path: Path) -> None:
    """Raise UsageError on all ranks if none of them can read a checkpoint.

    It is called before anything is created. If nodes share no disk, one readable copy is enough.
    """
    problem: tuple[str, str] | None = None
    try:
        if path.is_file():
            raise UsageError(
                f"{path} is a file, and a checkpoint of several ranks is a directory",
                "weights from torch.save: model.load_state_dict(torch.load(FILE)) before the"
                " Trainer",
            )
        checkpoint_store.resolve_checkpoints(str(path))
    except OrchestratorError as error:
        problem = (error.what, error.fix)
    if all(problems := gather_values(problem)):
        raise UsageError(*(problems[0] or ()))


def refuse_later(path: Path, step: int) -> None:
    """Raise UsageError if the directory has later steps: new ones would be pruned first."""
    highest_here = max(
        (checkpoint.step for checkpoint in checkpoint_store.list_checkpoints(path)), default=0
    )
    highest = max(gather_values(highest_here))
    if highest > step:
        raise UsageError(
            f"{path} holds step {highest} of another run, and this one is at step {step}",
            "resume=True (checkpoint.resume=auto) goes on from it; save_to="
            " (checkpoint.directory) names another directory",
        )
