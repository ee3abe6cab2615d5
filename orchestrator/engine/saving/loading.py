"""Find the state to go on from, verify it, and load it into model and optimizer.

There is one way to load one, from any source: a disk that all ranks see, the disks of several
nodes, which bring each other their parts, or the memory of the nodes.

Whoever reads creates nothing, marks nothing and removes nothing: another program may be saving into
the same directory.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from orchestrator.common import text
from orchestrator.common.errors import CheckFailed, OrchestratorError, UsageError
from orchestrator.common.text import Say
from orchestrator.engine.ranks import plain_names
from orchestrator.engine.ranks.ranks import Ranks, gather, host_group
from orchestrator.engine.saving import node_disks, reader
from orchestrator.engine.saving.checkpoint import (
    MODEL,
    SEEN_WITHIN_SECONDS,
    first_cause,
    state_of,
)
from orchestrator.engine.saving.exchange import Parts, agreed_pieces, part_of
from orchestrator.engine.saving.in_memory.memory_file import Notes
from orchestrator.engine.saving.in_memory.search import Found
from orchestrator.engine.saving.node_disks import NodeDisks
from orchestrator.engine.saving.ownership import run_of, saved_by
from orchestrator.engine.saving.pieces import DTYPES, Kept, Place, places_of, several
from orchestrator.engine.sharding.mesh import local_tensor
from orchestrator.records import checkpoint_manifest, checkpoint_parts, checkpoint_store
from orchestrator.records.checkpoint_parts import Candidate
from orchestrator.records.checkpoint_store import Checkpoint

# Takes a checkpoint's progress; raises CheckFailed if this program cannot use it.
Accept = Callable[[Any], None]
Find = Callable[[], list[Checkpoint]]


class Auxiliary(Protocol):
    """Describes what is beside the model: the optimizer's state, and what a program keeps."""

    def prime(self, progress: Mapping[str, Any]) -> Mapping[str, Tensor]: ...

    def restore(self, progress: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Target:
    """The model and optimizer that a state is loaded into, and what their program thinks of it."""

    ranks: Ranks
    model: nn.Module
    auxiliary: Auxiliary
    accept: Accept
    say: Say

    def parts(self, progress: Any, kept: Kept) -> Parts:
        """Accept a state by its progress, and give the tensors that it is read into."""
        self.accept(progress)
        primed = self.auxiliary.prime(progress["stepper"])
        places = {place.name: place for of_shard in kept.values() for place in of_shard}
        if changed := take_shapes(self.model, places, self.ranks.device):
            self.say(f"{several(changed)}: with the shape that was saved, not that of this model")
        state = state_of(self.model, primed)
        if strange := [name for name in places if name.startswith(MODEL) and name not in state]:
            self.say(f"WARNING: {several(strange)} is not in this model, and is not read")
        pairs = zip(places_of(state), state.values(), strict=True)
        return {place.name: (place, local_tensor(value)) for place, value in pairs}


class Source(Protocol):
    """A state that may be loaded: on a disk that all ranks see, in parts, or in memory."""

    def load(self, target: Target) -> Loaded | None:
        """Fill the target; None where the state cannot be trusted, once it is said why."""
        ...


@dataclass(frozen=True)
class Loaded:
    """A state that was loaded, and what is said of it."""

    checkpoint: Checkpoint
    origin: str  # where it was, and how large it is
    comment: str


def load_state(sources: Iterable[Source], target: Target) -> Checkpoint | None:
    """Load the first of these that can be trusted. Every rank calls it, with the same ones."""
    began = time.perf_counter()
    for source in sources:
        if (loaded := source.load(target)) is None:
            continue
        target.auxiliary.restore(loaded.checkpoint.progress["stepper"])
        seconds = time.perf_counter() - began
        target.say(
            f"resuming after step {loaded.checkpoint.step}, from {loaded.origin} verified and read"
            f" in {seconds:.2f} s{loaded.comment}"
        )
        return loaded.checkpoint
    return None


@dataclass(frozen=True)
class OnDisk:
    """A checkpoint that all ranks see in one place."""

    checkpoint: Checkpoint

    def load(self, target: Target) -> Loaded | None:
        checkpoint, ranks = self.checkpoint, target.ranks
        problems = verify(checkpoint, ranks)
        if problems:
            target.say(
                f"WARNING: step {checkpoint.step} cannot be trusted: {'; '.join(problems[:3])};"
                " trying the one before it"
            )
            return None
        with said_of_all(checkpoint.path):
            metadata = reader.metadata_of(checkpoint.path)
            kept = reader.places_in(metadata)
        into = target.parts(checkpoint.progress, kept)
        pieces = agreed_pieces(into, kept, (), str(checkpoint.path), host_group())
        with said_of_all(checkpoint.path):
            read = reader.PieceReader(checkpoint.path, metadata).read
            read(pieces, [part_of(into, piece) for piece in pieces])
        origin = f"{checkpoint.path}: {text.size(checkpoint.size)}"
        return Loaded(checkpoint, origin, f"; {saved_by(checkpoint.progress, checkpoint.created)}")


@dataclass(frozen=True)
class InParts:
    """A checkpoint whose parts are on the disks of several nodes; `room` is where they save."""

    candidate: Candidate
    here: Sequence[Checkpoint]  # all that this node has
    room: Path

    def load(self, target: Target) -> Loaded | None:
        candidate = self.candidate
        path = self.path or checkpoint_store.final(self.room, candidate.step)
        while candidate.whole:
            disks = NodeDisks(candidate, target.ranks)
            manifest = disks.manifest()
            metadata, damaged = disks.metadata()
            if not damaged:
                kept = disks.kept(metadata)
                into = target.parts(manifest.progress, kept)
                pieces = agreed_pieces(into, kept, disks.near, str(path), host_group())
                damaged = disks.damaged(pieces)
            if not damaged:
                came = disks.fill(pieces, into, metadata)
                checkpoint = Checkpoint(path, **vars(manifest))
                origin = f"{path} and the other nodes: {text.size(came)} came from other nodes;"
                by = saved_by(checkpoint.progress, checkpoint.created)
                return Loaded(checkpoint, origin, f"; {by}")
            candidate = candidate.without(damaged)
        return self._pass_over(candidate, target)

    def _pass_over(self, short: Candidate, target: Target) -> Loaded | None:
        words = short.shortage()
        target.say(f"WARNING: {words} on the nodes of this job; trying the one before it")
        return None

    @property
    def path(self) -> Path | None:
        """Return where this node has that checkpoint, or a part of it."""
        wanted = self.candidate.step, self.candidate.save
        return next((part.path for part in self.here if (part.step, part.save) == wanted), None)


@dataclass(frozen=True)
class InMemory:
    """A state that an earlier attempt has kept in the memory of the nodes."""

    found: Found
    where: Path

    def load(self, target: Target) -> Loaded:
        found, notes = self.found, self.found.notes
        progress = json.loads(notes.rest)
        found.bring(target.parts(progress, found.kept))
        ranks = text.plural(found.travelled, "rank")
        comment = f"; {ranks} took it from another node" if found.travelled else ""
        comment += f", put together from {found.layout}" if found.layout else ""
        checkpoint = Checkpoint(self.where, notes.step, progress=progress)
        return Loaded(checkpoint, f"memory ({self.where}): {text.size(found.size)}", comment)


@contextlib.contextmanager
def said_of_all(path: Path) -> Iterator[None]:
    """Let all ranks hear that one cannot read a checkpoint."""
    problem = ""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (torch raises all kinds for a file that is none)
        problem = first_cause(error)
    if problem := next(filter(None, gather(problem)), ""):
        raise CheckFailed(f"{path} cannot be read: {problem}")


def take_shapes(model: nn.Module, saved: Mapping[str, Place], device: torch.device) -> list[str]:
    """Give buffers the shapes that they were saved with: some grow, and some come to be in the
    first forward. Return the names of those that had another one."""
    changed = []
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            place = saved.get(MODEL + plain_names.plain(f"{prefix}.{name}" if prefix else name))
            if place is None or name in module._non_persistent_buffers_set:
                continue
            if buffer is None:
                new = torch.zeros(place.whole, dtype=DTYPES[place.dtype], device=device)
                module._buffers[name] = new
            elif tuple(buffer.shape) != place.whole:
                buffer.data = torch.zeros(place.whole, dtype=buffer.dtype, device=buffer.device)
                changed.append(place.name)
    return changed


def resume(find: Find, target: Target, room: Path, *, required: bool) -> Checkpoint | None:
    """Load the first that verifies of those that look() finds, and say whose it is.

    Where nodes share no disk, ranks bring each other what their nodes lack; `room` is where they
    save. It is an error if one is required, and none of those that there are is whole.
    """
    checkpoints, shared = agree(find, target.ranks)
    if shared:
        return load_state(map(OnDisk, checkpoints), target)
    found = node_disks.pool(checkpoints, target.ranks)
    for foreign in (checkpoint for checkpoint in checkpoints if checkpoint.foreign):
        target.say(f"WARNING: step {foreign.step} cannot be trusted: {foreign.problem}")
    loaded = load_state((InParts(candidate, checkpoints, room) for candidate in found), target)
    if loaded is None and found and required:
        raise checkpoint_parts.nothing_whole(found)
    return loaded


def agree(find: Find, ranks: Ranks) -> tuple[list[Checkpoint], bool]:
    """Find checkpoints, newest first, and tell whether all ranks see the same ones, complete."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while True:
        checkpoints, problem = [], ""
        try:
            # What was saved last comes first: steps of an older run may be higher.
            checkpoints = checkpoint_store.newest_first(find())
        except OrchestratorError as error:
            problem = str(error)
        seen = repr([stamp(checkpoint) for checkpoint in checkpoints])
        digest = hashlib.sha256(seen.encode()).digest()
        parts = any(checkpoint.part for checkpoint in checkpoints)
        answers = gather((problem, digest, parts, time.monotonic() > deadline))
        if all(trouble for trouble, _, _, _ in answers):
            raise CheckFailed(answers[0][0])
        if any(parts for _, _, parts, _ in answers):
            return checkpoints, False
        if all(other == digest for _, other, _, _ in answers):
            return checkpoints, True
        if answers[0][3]:  # rank 0's clock; on a shared disk, a file may show up a moment later
            return checkpoints, False
        time.sleep(0.05)


def stamp(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """Describe a checkpoint so that those on two disks differ, whatever they have in common."""
    changed = 0
    with contextlib.suppress(OSError):
        changed = (checkpoint.path / checkpoint_manifest.NAME).stat().st_mtime_ns
    return checkpoint.step, checkpoint.created, str(checkpoint.path), changed


def verify(checkpoint: Checkpoint, ranks: Ranks) -> list[str]:
    """Share the reading among all ranks; all come to the same answer."""
    mine = sorted(checkpoint.files)[ranks.rank :: ranks.world]
    found = checkpoint_store.verify(checkpoint, mine) or (
        [checkpoint.problem] if checkpoint.problem else []
    )
    return list(dict.fromkeys(problem for problems in gather(found) for problem in problems))


# -- what is in memory -------------------------------------------------------------------------


def newer_than(find: Find, notes: Notes) -> Find:
    """Look at what the same run has saved on disk after the state that is in memory."""
    kept = json.loads(notes.rest)
    reached = checkpoint_manifest.generation(kept), notes.step

    def later(checkpoint: Checkpoint) -> bool:
        theirs, ours = run_of(checkpoint.progress), run_of(kept)
        same = theirs is not None and ours is not None and theirs.id == ours.id
        return same and (checkpoint.generation, checkpoint.step) > reached

    return lambda: [checkpoint for checkpoint in find() if later(checkpoint)]


# -- what is looked at ----------------------------------------------------------------------------


def named(path: str, local: Path | None = None) -> Find:
    """Look at a step, a directory of steps, or an experiment.

    A node that shares no disk with the head knows experiments by what their jobs left there, beside
    the run whose checkpoints go into `own`.
    """

    def find() -> list[Checkpoint]:
        try:
            return checkpoint_store.resolve(path)
        except UsageError:
            left = [
                checkpoint for place in left_here(path, local) for checkpoint in in_directory(place)
            ]
            if not left:
                raise
            return left

    return find


def left_here(name: str, local: Path | None) -> list[Path]:
    """List where jobs of an experiment left checkpoints on this node."""
    run = local.parent.parent if local is not None else Path()
    name = Path(name).name
    if run.name != "experiment" or not name:
        return []
    pattern = f"{glob.escape(name)}-*/*/experiment/outputs/checkpoints"
    return [
        *sorted(run.parent.parent.parent.glob(pattern)),
        *([local] if local is not None else []),
    ]


def newest(directory: Path, *, searches: bool, accept: Accept, say: Say) -> Find:
    """Look at a directory; if it may search, also at earlier runs of the same program."""
    mentioned: set[str] = set()  # it may look several times

    def pass_over(text: str) -> None:
        if text not in mentioned:
            mentioned.add(text)
            say(text)

    def find() -> list[Checkpoint]:
        checkpoints = in_directory(directory)
        if not searches:
            return checkpoints
        if checkpoints and (reason := reason_against(checkpoints, accept)):
            pass_over(passed_over(directory, reason))
            checkpoints = []
        return checkpoints or earlier_runs(directory, accept, pass_over)

    return find


def in_directory(path: Path, exposed: str | None = None) -> list[Checkpoint]:
    """Return all that a directory has, and parts that a crash has kept from being published."""
    exposed = checkpoint_store.exposure(path) if exposed is None else exposed
    checkpoints = checkpoint_store.every(path, exposed=exposed)
    known = {(checkpoint.step, checkpoint.save) for checkpoint in checkpoints}
    parts = checkpoint_store.described(path, exposed=exposed)
    return [*checkpoints, *(part for part in parts if (part.step, part.save) not in known)]


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
            checkpoints = in_directory(path, checkpoint_store.exposure(directory))
            if checkpoints and all(checkpoint.foreign for checkpoint in checkpoints):
                say(passed_over(path, checkpoints[0].problem))
            elif checkpoints and not (reason := reason_against(checkpoints, accept)):
                return checkpoints
            elif checkpoints:
                say(passed_over(path, reason))
    return []


def passed_over(directory: Path, reason: str) -> str:
    return f"the checkpoints in {directory} are skipped: {reason}"


def reason_against(checkpoints: Iterable[Checkpoint], accept: Accept) -> str:
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
    answers = gather((problem, path.is_file()))
    problems = [problem for problem, _ in answers if problem]
    # Where nodes share no disk, it is enough that one has it.
    if len(problems) == len(answers) or any(is_file for _, is_file in answers):
        raise UsageError(*(problem or problems[0]))


def refuse_later(path: Path, step: int) -> None:
    """Refuse to save next to later steps: new checkpoints would be the first to be removed."""
    highest_here = max((checkpoint.step for checkpoint in checkpoint_store.every(path)), default=0)
    highest = max(gather(highest_here))
    if highest > step:
        raise UsageError(
            f"{path} holds step {highest} of another run, and this one is at step {step}",
            "resume=True (checkpoint.resume=auto) goes on from it; save_to="
            " (checkpoint.directory) names another directory",
        )
