"""Find the checkpoint to go on from, verify it, and read it into model and optimizer.

Whoever reads creates nothing, marks nothing and removes nothing: another program may be saving into
the same directory.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from orchestrator import text
from orchestrator.engine.ranks.mesh import local_tensor
from orchestrator.engine.ranks.ranks import Ranks, gather, host_group
from orchestrator.engine.saving.checkpoint import SEEN_WITHIN, Say, Steps, first_cause, state_of
from orchestrator.engine.saving.memory import Found
from orchestrator.engine.saving.ownership import run_of, saved_by
from orchestrator.engine.saving.reader import CheckpointReader, TensorPlanner
from orchestrator.errors import CheckFailed, OrchestratorError, UsageError
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import Checkpoint

# Takes a checkpoint's progress; raises CheckFailed if this program cannot use it.
Accept = Callable[[Any], None]
Look = Callable[[], list[Checkpoint]]


@dataclass(frozen=True)
class Readers:
    """The ranks that together read one complete checkpoint: all, or those of one node."""

    group: dist.ProcessGroup | None
    index: int
    size: int


def resume(
    look: Look, ranks: Ranks, model: nn.Module, stepper: Steps, accept: Accept, say: Say
) -> Checkpoint | None:
    """Read the first that verifies of those that look() finds, and say whose it is."""
    began = time.perf_counter()
    candidates, readers = agree(look, ranks)
    for checkpoint in candidates:
        problems = verify(checkpoint, readers)
        if problems:
            say(
                f"WARNING: step {checkpoint.step} cannot be trusted: {'; '.join(problems[:3])};"
                " trying the one before it"
            )
            continue
        accept(checkpoint.progress)
        stepper.prime(checkpoint.progress["stepper"])
        state = state_of(model, stepper)
        try:
            reader = CheckpointReader(checkpoint.path)
            group = readers.group
            load(state, storage_reader=reader, planner=TensorPlanner(), process_group=group)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 (as torch has it)
            raise CheckFailed(
                f"{checkpoint.path} does not fit this model and optimizer: {first_cause(error)}",
                "resume with the model.* and optimizer.name that it was saved with",
            ) from None
        stepper.restore(checkpoint.progress["stepper"])
        seconds = time.perf_counter() - began
        say(
            f"resuming after step {checkpoint.step}, from {checkpoint.path}:"
            f" {checkpoint.size / 1e6:,.1f} MB verified and read in {seconds:.2f} s;"
            f" {saved_by(checkpoint.progress, checkpoint.created)}"
        )
        return checkpoint
    return None


def agree(look: Look, ranks: Ranks) -> tuple[list[Checkpoint], Readers]:
    """Find the checkpoints that all ranks see, newest first."""
    deadline = time.monotonic() + SEEN_WITHIN
    while True:
        checkpoints, problem = [], ""
        try:
            # What was saved last comes first: steps of an older run may be higher.
            checkpoints = sorted(look(), key=lambda checkpoint: checkpoint.created, reverse=True)
        except OrchestratorError as error:
            problem = str(error)
        steps = [
            (checkpoint.step, checkpoint.created, str(checkpoint.path))
            for checkpoint in checkpoints
        ]
        digest = hashlib.sha256(repr(steps).encode()).digest()
        answers = gather((problem, digest, time.monotonic() > deadline))
        if trouble := next((other for other, _, _ in answers if other), ""):
            raise CheckFailed(trouble)
        if all(other == digest for _, other, _ in answers):
            return checkpoints, Readers(host_group(), ranks.rank, ranks.world)
        if answers[0][2]:  # rank 0's clock; on a shared disk, a file may show up a moment later
            break
        time.sleep(0.05)
    seen = gather([step for step, _, _ in steps])
    common = set.intersection(*map(set, seen))
    order = [step for step in seen[0] if step in common]
    own = {checkpoint.step: checkpoint for checkpoint in checkpoints}
    return [own[step] for step in order], readers_of_a_node(ranks)


def readers_of_a_node(ranks: Ranks) -> Readers:
    """Let each node read checkpoints of its own, where there is no shared disk."""
    mine = ranks.nodes[ranks.rank][0]
    group = None
    for node in sorted({node for node, _ in ranks.nodes}):
        new = dist.new_group(ranks.of_node(node), backend="gloo")
        group = new if node == mine else group
    members = ranks.neighbours
    return Readers(group, members.index(ranks.rank), len(members))


def verify(checkpoint: Checkpoint, readers: Readers) -> list[str]:
    """Share the reading among all ranks; all come to the same answer."""
    mine = sorted(checkpoint.files)[readers.index :: readers.size]
    own = checkpoint_store.verify(checkpoint, mine) or (
        [checkpoint.problem] if checkpoint.problem else []
    )
    return list(dict.fromkeys(problem for problems in gather(own) for problem in problems))


# -- what is in memory -------------------------------------------------------------------------


def newer_than(look: Look, found: Found) -> Look:
    """Look at what the same run has saved on disk after the state that is in memory."""
    kept = json.loads(found.state.notes.rest)

    def later(checkpoint: Checkpoint) -> bool:
        theirs, own = run_of(checkpoint.progress), run_of(kept)
        same = theirs is not None and own is not None and theirs.id == own.id
        return same and checkpoint.step > found.state.notes.step

    return lambda: [checkpoint for checkpoint in look() if later(checkpoint)]


def take(found: Found, where: Path, model: nn.Module, stepper: Steps, say: Say) -> Checkpoint:
    """Go on from a state that was kept in memory."""
    notes = found.state.notes
    progress = json.loads(notes.rest)
    stepper.prime(progress["stepper"])
    state = state_of(model, stepper)
    kept = found.state.tensors()
    shapes = [
        {name: (tuple(local_tensor(value).shape), value.dtype) for name, value in tensors.items()}
        for tensors in (state, kept)
    ]
    if any(gather(shapes[0] != shapes[1])):
        raise CheckFailed(f"the state of step {notes.step} in {where} does not fit this model")
    for name, value in state.items():
        local_tensor(value).copy_(kept[name])
    stepper.restore(progress["stepper"])
    elsewhere = f"; {found.travelled} ranks have it from another node" if found.travelled else ""
    say(f"resuming after step {notes.step}, from memory ({where}): {text.size(found.size)}"
        f" verified and read{elsewhere}")  # fmt: skip
    return Checkpoint(where, notes.step, progress=progress)


# -- what is looked at ----------------------------------------------------------------------------


def named(path: str) -> Look:
    """Look at a step, a directory of steps, or an experiment."""
    return lambda: checkpoint_store.resolve(path)


def newest(directory: Path, *, searches: bool, accept: Accept, say: Say) -> Look:
    """Look at a directory; if it may search, also at earlier runs of the same program."""
    mentioned: set[str] = set()  # it may look several times

    def pass_over(text: str) -> None:
        if text not in mentioned:
            mentioned.add(text)
            say(text)

    def look() -> list[Checkpoint]:
        checkpoints = checkpoint_store.every(
            directory, exposed=checkpoint_store.exposure(directory)
        )
        if not searches:
            return checkpoints
        if checkpoints and (why := why_not(checkpoints, accept)):
            pass_over(passed_over(directory, why))
            checkpoints = []
        return checkpoints or earlier_runs(directory, accept, pass_over)

    return look


def earlier_runs(directory: Path, accept: Accept, say: Say = lambda text: None) -> list[Checkpoint]:
    """Find the newest experiment of the same name, next to this one, that has a checkpoint.

    One that another program wrote does not count: programs share the name by default.
    A node that shares no disk has its own: runs/<experiment>-<id>/<node>/experiment.
    """
    run, inner = directory.parent.parent, Path("outputs/checkpoints")
    if run.name == "experiment":
        run, inner = run.parent.parent, Path("*/experiment/outputs/checkpoints")
    same_name = re.fullmatch(r"(.+)_\d{8}_\d{6}(-\w+)?", run.name)
    if same_name is None:
        return []
    pattern = f"{glob.escape(same_name[1])}_[0-9]*_[0-9]*"
    for other in sorted(run.parent.glob(pattern), reverse=True):
        for path in other.glob(str(inner)) if other != run else ():
            checkpoints = checkpoint_store.every(path, exposed=checkpoint_store.exposure(directory))
            if checkpoints and all(checkpoint.foreign for checkpoint in checkpoints):
                say(passed_over(path, checkpoints[0].problem))
            elif checkpoints and not (why := why_not(checkpoints, accept)):
                return checkpoints
            elif checkpoints:
                say(passed_over(path, why))
    return []


def passed_over(directory: Path, why: str) -> str:
    return f"the checkpoints in {directory} are passed over: {why}"


def why_not(checkpoints: Iterable[Checkpoint], accept: Accept) -> str:
    """Say why they are not this program's; one whose manifest is damaged may pass."""
    try:
        for checkpoint in checkpoints:
            if checkpoint.progress is not None:
                accept(checkpoint.progress)
    except CheckFailed as error:
        return error.what
    return ""


# -- what is refused ------------------------------------------------------------------------------


def refuse_unreadable(path: Path) -> None:
    """Look before anything is made."""
    problem: tuple[str, str] | None = None
    if path.is_file():
        problem = (
            f"{path} is a file, and a checkpoint of several ranks is a directory",
            "weights from torch.save: model.load_state_dict(torch.load(FILE)) before the Trainer",
        )
    else:
        try:
            checkpoint_store.resolve(str(path))
        except OrchestratorError as error:
            problem = (error.what, error.fix)
    for rank, other in enumerate(gather(problem)):
        if other is not None:
            raise UsageError(f"rank {rank}: {other[0]}" if problem is None else other[0], other[1])


def refuse_later(path: Path, step: int) -> None:
    """Refuse to save next to later steps: new checkpoints would be the first to be removed."""
    later = max((checkpoint.step for checkpoint in checkpoint_store.every(path)), default=0)
    highest = max(gather(later))
    if highest > step:
        raise UsageError(
            f"{path} holds step {highest} of another run, and this one is at step {step}",
            "resume=True (checkpoint.resume=auto) goes on from it; save_to="
            " (checkpoint.directory) names another directory",
        )
