"""Save and resume the state of a training: stores on disk, states in memory, ownership."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.common.errors import CheckFailed, OrchestratorError
from orchestrator.common.text import Say
from orchestrator.common.version import __version__
from orchestrator.engine.core import average
from orchestrator.engine.core.kept import WHAT_IS_DRAWN, Snapshot
from orchestrator.engine.core.parts import Parts, as_path
from orchestrator.engine.core.settings import outputs_directory
from orchestrator.engine.core.stopping import TrainingRequest, TrainState
from orchestrator.engine.data.batch import Batches, DataPlace
from orchestrator.engine.ranks import agreement, plain_names
from orchestrator.engine.ranks.ranks import from_rank_0, gather_values, run_together
from orchestrator.engine.saving import loading, memory, mirror, ownership, search, weights
from orchestrator.engine.saving.checkpoint import Checkpoints
from orchestrator.engine.saving.memory import Memory
from orchestrator.engine.saving.nodes import holds_all
from orchestrator.engine.saving.state import state_of as state_of_model
from orchestrator.engine.sharding import mesh
from orchestrator.records import checkpoint_store

KEEP_ALL = 1 << 30
NUMBERS = itertools.count(1)
# The sections of the config in a manifest, which hold no secrets.
RECORDED = ("training", "fsdp", "distributed")


class Checkpointing:
    """Loads and saves the state of one Trainer.

    `checkpoints` is the store of the running training, if it saves. `memory` holds states that
    outlive this process, if the launch may restart it.
    """

    def __init__(self, parts: Parts, say: Say, *, built_in: bool) -> None:
        self.parts, self.say, self.built_in = parts, say, built_in
        self.state = TrainState()
        self.run = ownership.new_run(parts.bare, built_in=built_in)
        self.checkpoints: Checkpoints | None = None
        self.memory: Memory | None = None
        # The time at which the loaded state was saved.
        self.latest = 0.0
        # Numbers the Trainers of this program that have trained, from 1 on.
        self.number = 0
        # The last state is saved when a training ends.
        self.at_end = False
        # True once the optimizer's state was checked to be savable.
        self.savable = False
        self.drawn = DataPlace()
        for stepper in parts.steppers:
            if stepper.average is not None:
                parts.auxiliary.add(average.name_of(stepper.name), stepper.average)
        parts.auxiliary.add(WHAT_IS_DRAWN, self.drawn)

    # -- calls of the program ----------------------------------------------------------------------

    def save_to(self, directory: Path) -> Path:
        """Save into directory/step_NNNNNNNN, wait until it is complete, and return that path."""
        store = self._store(directory, KEEP_ALL, background=False, url=None)
        with contextlib.closing(store):
            self._save_into(store)
            store.finish()
            store.leave()
        return checkpoint_store.final_path(store.directory, self.state.step)

    def load(self, path: Path) -> Path:
        """Load one step, or the newest in a directory that verifies; return that step's path."""
        search.refuse_unreadable(path)
        room = path.parent if checkpoint_store.STEP.fullmatch(path.name) else path
        return self._load_named(str(path), room).path

    def _load_named(self, path: str, room: Path) -> checkpoint_store.Checkpoint:
        loaded = self._load(search.search_of_path(path, room), room)
        if loaded is None:
            raise CheckFailed(
                f"{path}: none of its checkpoints verifies",
                "look at them with: orchestrator checkpoint verify",
            )
        return loaded

    def _load(
        self,
        find: search.Find | None,
        room: Path,
        *,
        in_memory: Path | None = None,
        disk_alone: bool = True,
    ) -> checkpoint_store.Checkpoint | None:
        parts = self.parts
        target = loading.LoadTarget(parts.ranks, self.run, parts.bare, parts.auxiliary, self.say)
        loaded = loading.resume_state(find, target, room, memory=in_memory, disk_alone=disk_alone)
        if loaded is not None:
            for words in parts.auxiliary.differences(loaded.progress):
                self.say(f"WARNING: {words}")
            self.state = TrainState(**loaded.progress["state"])
            for stepper in parts.steppers:
                stepper.scheduler.restore(loaded.progress["scheduler"][stepper.name])
            if before := ownership.run_of(loaded.progress):
                self.run = dataclasses.replace(self.run, id=before.id)
            self.latest = loaded.created
        return loaded

    # -- the start of a training -------------------------------------------------------------------

    def begin(self, asked: TrainingRequest, training: Batches) -> None:
        """Resume if requested or restarted, and open the stores that the training saves into."""
        self.at_end, self.savable = asked.at_end, False
        place = self._place_in_memory()
        self.checkpoints = self._resumed(asked, place)
        self._open_memory(place)
        self.drawn.begin(training, self.state, self.say)

    def say_where(self) -> None:
        """Print the checkpoint directory, or that nothing is saved.

        In a launched job the head prints the directory instead.
        """
        if self.checkpoints is not None:
            if outputs_directory() is None:
                self.say(f"checkpoints go to {self.checkpoints.directory}")
        else:
            how = "checkpoint.directory" if self.built_in else "train(..., save_to=DIR)"
            self.say(f"nothing of it is saved: {how} saves at the end and when it is stopped")

    def end_with_nothing_done(self) -> None:
        self.say(
            f"nothing to do: {self.state.epoch} epochs and {self.state.step} steps are done,"
            " and both count from the very beginning"
        )
        if self.checkpoints is not None:
            self.checkpoints.close()

    def _resumed(self, asked: TrainingRequest, place: Path | None) -> Checkpoints | None:
        """Resume if requested or restarted; return the store on disk, if the training saves."""
        default = (outputs_directory() or Path()) / "checkpoints"
        directory = as_path(asked.directory or default)
        loaded = self._begun(asked, place, directory)
        if not asked.saves:
            return None
        # Without a shared disk, a node without the checkpoint may have loaded a temporary copy.
        here = loaded is not None and all(gather_values(loaded.path.parent == directory))
        if asked.asks_to_save and not here:
            search.refuse_later(directory, self.state.step)
        config = self.parts.config.checkpoint
        checkpoints = self._store(
            directory, asked.keep, background=config.asynchronous, url=config.mirror
        )
        if loaded is not None and here:
            checkpoints.last_saved = loaded.step
        checkpoints.known_whole = self.state.step
        return checkpoints

    def _begun(
        self, asked: TrainingRequest, place: Path | None, directory: Path
    ) -> checkpoint_store.Checkpoint | None:
        """Load the checkpoint to resume from, if there is one."""
        searches = asked.directory is None and asked.resume == "auto"
        find = search.search_for_newest(
            directory, searches=searches, accept=self._accept, say=self.say
        )
        loaded = None
        again = asked.resume == "auto" or ownership.attempt_number() > 1
        if again or place is not None:
            # Checkpoints of an earlier attempt belong to this run.
            loaded = self._load(find, directory, in_memory=place, disk_alone=again)
        named = None if asked.resume in ("auto", "never") else asked.resume
        url = named or (self.parts.config.checkpoint.mirror if again else None)
        if loaded is None and url and "://" in url:
            named = self._fetched(url, directory)
        if loaded is None and named is not None:
            loaded = self._load_named(named, directory)
        if loaded is None and asked.resume == "auto":
            self.say(f"nothing to resume from in {directory}: starting from the beginning")
        return loaded

    def _fetched(self, url: str, directory: Path) -> str | None:
        """Download the newest checkpoint of a mirror on rank 0; return its path on all ranks.

        The other ranks receive their part when it is loaded.
        """
        path = from_rank_0(
            run_together(
                lambda: mirror.fetch_checkpoint(url, directory, self.say),
                here=self.parts.ranks.rank == 0,
                said=lambda error: CheckFailed(f"{url}: {error}"),
            )
        )
        return None if path is None else str(path)

    def _store(
        self, directory: Path, keep: int, *, background: bool, url: str | None
    ) -> Checkpoints:
        """Open a store. One in the background copies the state; otherwise the caller waits."""
        wanted = dataclasses.replace(
            self.parts.config.checkpoint, keep=keep, asynchronous=background, mirror=url
        )
        store = Checkpoints(
            wanted,
            directory,
            self.parts.ranks,
            self.run,
            self.say,
            node_holds_all=holds_all(self.parts.mesh, self.parts.ranks),
        )
        store.latest = max(store.latest, self.latest)
        return store

    def _place_in_memory(self) -> Path | None:
        """Return the directory for states in memory, for the first training of this Trainer.

        Only before the first training can an earlier attempt's state be newer. Afterwards this
        Trainer itself has the newest.
        """
        if self.number:
            return None
        self.number = next(NUMBERS)
        every = self.parts.config.checkpoint.memory_every
        return memory.memory_directory(f"trainer{self.number}", every, self.say)

    def _open_memory(self, place: Path | None) -> None:
        """Keep states in memory from now on; drop those of other steps than the present one."""
        if place is None:
            return
        self.memory = Memory(
            place,
            self.parts.ranks,
            self.run,
            self.say,
            node_holds_all=holds_all(self.parts.mesh, self.parts.ranks),
            every=self.parts.config.checkpoint.memory_every,
        )
        if not self.memory.off:
            self.memory.latest = max(self.memory.latest, self.latest)
            self.memory.keep_only(self.state.step)

    def _accept(self, progress: Any) -> None:
        """Refuse a checkpoint of another script or model, unless the user named it explicitly."""
        other = ownership.run_of(progress)
        if other is None or (other.program, other.model) == (self.run.program, self.run.model):
            return
        what = f"saved by {other}, this is {self.run.program}"
        if other.program == self.run.program:
            what = f"{other} saved them with another model"
        raise CheckFailed(what)

    # -- during a training -------------------------------------------------------------------------

    def refuse_unsaved(self) -> None:
        """Refuse at the first step an optimizer whose state cannot be saved, if anything saves."""
        if self.savable or not (self.checkpoints or self.memory):
            return
        self.savable = True
        self.parts.auxiliary.refuse_unsavable()

    def save(self) -> None:
        """Save into the store of this training."""
        assert self.checkpoints is not None
        self._save_into(self.checkpoints)

    def save_last(self) -> None:
        """Save the last state; if that fails, free space and retry: no later save follows."""
        checkpoints = self.checkpoints
        assert checkpoints is not None
        failed = checkpoints.failed_everywhere()
        if failed or (self.at_end and checkpoints.last_saved != self.state.step):
            self.save()
            failed = checkpoints.failed_everywhere()
        if failed:
            # Only ranks that publish checkpoints prune, so an error must not end them alone.
            with contextlib.suppress(OrchestratorError):
                checkpoints.prune(1)
            self.save()
            failed = checkpoints.failed_everywhere()
        if failed:
            raise checkpoints.failure(
                f"the last checkpoint, of step {self.state.step},",
                checkpoints.culprit,
                "the weights of this run are lost; those of the checkpoints before it are there",
            )

    def keep_in_memory(self, *, last: bool = False) -> None:
        """Keep the state in memory; with `last`, only if this step's state is not kept yet."""
        memory = self.memory
        if memory is None or (last and (memory.off or memory.last_saved == self.state.step)):
            return
        self._save_into(memory)

    def _save_into(self, checkpoints: Checkpoints) -> None:
        parts, state, in_memory = self.parts, self.state, checkpoints.in_memory
        # States in memory are kept at intervals that depend on timing. If they changed buffers, two
        # runs of the same training would differ.
        if not in_memory:
            agreement.take_buffers_of_first(parts.bare)
        best = state.best is not None and state.best_step == state.step
        snapshot = parts.auxiliary.snapshot()
        described = checkpoints.writers.first and not in_memory
        progress = {
            **self._progress(snapshot, checkpoints.run),
            "aliases": aliases_of(parts.bare),
            "configs": configs_of(parts.bare) if described else {},
        }
        tensors = state_of_model(parts.bare, snapshot.tensors)
        checkpoints.save(state.step, tensors, progress, best=best)

    def _progress(self, snapshot: Snapshot, run: ownership.TrainingRun) -> dict[str, Any]:
        """Return all state other than tensors, ready for JSON."""
        state, steppers, config = self.state, self.parts.steppers, self.parts.config
        return {
            "step": state.step,
            "position": state.position,
            "tokens": state.tokens,
            "stepper": snapshot.progress,
            "state": dataclasses.asdict(state),
            "scheduler": {each.name: each.scheduler.state() for each in steppers},
            "run": dataclasses.asdict(run),
            "config": {name: dataclasses.asdict(getattr(config, name)) for name in RECORDED},
            "versions": {"torch": torch.__version__, "orchestrator": __version__},
        }


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tensor, such as a tied weight, to the name it is saved under."""
    kept = plain_names.state_dict(model).keys()
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for named in (plain_names.named_parameters, plain_names.named_buffers):
        for name, value in named(model, every=True):
            saved = first.setdefault(id(value), name)
            if saved != name and name in kept:
                aliases[name] = saved
    return aliases


def configs_of(model: nn.Module) -> dict[str, str]:
    """Return the contents of Hugging Face's config files, for exporting the checkpoint later."""
    try:
        return weights.configs_of(model, mesh.plain_class(model).__name__)
    # A config of the user's own class may fail; the weights are worth more than it.
    except Exception:  # noqa: BLE001
        return {}
