"""Hold together the model on its ranks and what trains it, and what is saved of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from orchestrator.config.schema import Config
from orchestrator.engine.core.kept import AuxiliaryState, Snapshot, WhatTrains
from orchestrator.engine.core.optimizer import Schedulers
from orchestrator.engine.core.optimizer_state import HOW, by_name
from orchestrator.engine.core.step import Steppers
from orchestrator.engine.core.stopping import TrainState
from orchestrator.engine.data.batch import Micro
from orchestrator.engine.models.losses import Loss, Losses, Totals
from orchestrator.engine.ranks import agreement, plain_names
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.saving import ownership, weights
from orchestrator.engine.saving.checkpoint import Checkpoints
from orchestrator.engine.saving.state import frozen_of
from orchestrator.engine.saving.state import state_of as state_of_model
from orchestrator.engine.sharding import mesh
from orchestrator.engine.sharding.mesh import Mesh
from orchestrator.engine.sharding.used_parts import UsedParts


@dataclass(frozen=True)
class Parts:
    """The model, spread over the ranks, and everything that trains it."""

    config: Config
    ranks: Ranks
    mesh: Mesh
    model: nn.Module  # spread over the ranks
    bare: nn.Module  # without what ddp puts around it
    losses: Loss
    steppers: Steppers

    def totals(self, model: nn.Module, micro: Micro) -> Totals:
        """Compute the losses of a micro-batch, as far as their optimizers are due."""
        if isinstance(self.losses, Losses):
            return self.losses(model, micro.data, micro.drawn, self.steppers.names_due)
        return self.losses(model, micro.data, micro.drawn)

    @functools.cached_property
    def used(self) -> UsedParts | None:
        """The parts of a sharded model that a step uses; ddp looks after its own."""
        if self.mesh.mesh is None:
            return None
        alike = mesh.waits_for_copies(self.bare, self.mesh, self.config)
        return UsedParts(self.bare, alike=alike)

    @functools.cached_property
    def auxiliary(self) -> AuxiliaryState:
        """The optimizer's state, and what the program keeps beside it."""
        return AuxiliaryState(self.steppers)

    @functools.cached_property
    def what_trains(self) -> WhatTrains:
        """Which of the weights and modules train, beside what the program began with."""
        return WhatTrains(self.bare)


# -- what a checkpoint has of them that is no tensor -----------------------------------------------


def save_checkpoint(
    checkpoints: Checkpoints,
    parts: Parts,
    state: TrainState,
    schedulers: Schedulers,
    endless: bool,
) -> list[str]:
    """Save, and name what a program that begins anew could not read of it."""
    if not checkpoints.in_memory:  # how often that happens depends on the time it takes
        agreement.take_buffers_of_first(parts.bare)
    best = state.best is not None and state.best_step == state.step
    # On disk are the weights that an evaluation shows; in memory, those that train.
    shown = parts.steppers.evaluating(average=False)
    with contextlib.nullcontext() if checkpoints.in_memory else shown:
        snapshot = parts.auxiliary.snapshot()
        progress = {
            **progress_of(parts, snapshot, state, schedulers, endless, checkpoints.run),
            "aliases": aliases_of(parts.bare),
            "configs": (
                configs_of(parts.bare)
                if checkpoints.writers.first and not checkpoints.in_memory
                else {}
            ),
        }
        tensors, frozen = state_of_model(parts.bare, snapshot.tensors), frozen_of(parts.bare)
        checkpoints.save(state.step, tensors, progress, frozen=frozen, best=best)
    return [*parts.what_trains.unreadable(), *snapshot.unreadable]


def progress_of(
    parts: Parts,
    snapshot: Snapshot,
    state: TrainState,
    schedulers: Schedulers,
    endless: bool,
    run: ownership.Run,
) -> dict[str, Any]:
    """Give all of the state that is no tensor, as JSON keeps it."""
    return {
        "step": state.step,
        "position": state.position,
        "tokens": state.tokens,
        "stepper": snapshot.progress,
        "state": dataclasses.asdict(state),
        "scheduler": schedulers.state(),
        "given": by_name(given(parts.steppers, schedulers)),
        "endless": endless,
        "run": dataclasses.asdict(run),
    }


def given(steppers: Steppers, schedulers: Schedulers) -> dict[str, dict[str, Any]]:
    """Give what the program has set of each optimizer."""
    return {
        stepper.name: {
            "optimizer": stepper.initial_settings,
            "scheduler": schedulers.by_name[stepper.name].initial_settings,
        }
        for stepper in steppers
    }


def state_of(progress: Mapping[str, Any]) -> TrainState:
    """Read where a checkpoint was saved, also by earlier versions."""
    if "state" not in progress:  # the engine's, which had no epochs
        return TrainState(
            step=progress["step"], position=progress["position"], tokens=progress["tokens"]
        )
    saved = {"position": -1, **progress["state"]}  # the Trainer's once counted batches alone
    return TrainState(**{"epoch_sums": progress.get("epoch_sums", {}), **saved})


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tensor, such as a tied weight, to the name it is saved under."""
    kept = plain_names.state_dict(model).keys()
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for named in (plain_names.parameters, plain_names.buffers):
        for name, value in named(model, every=True):
            saved = first.setdefault(id(value), name)
            if saved != name and name in kept:
                aliases[name] = saved
    return aliases


def configs_of(model: nn.Module) -> dict[str, str]:
    """Give the files that Hugging Face has beside the weights, for an export of the checkpoint."""
    try:
        return weights.configs_of(model, mesh.plain_class(model).__name__)
    except Exception:  # noqa: BLE001 (code of a user's; the weights are worth more than this)
        return {}


def is_endless(progress: Mapping[str, Any]) -> bool:
    return bool(progress.get("endless", "state" not in progress))


# -- settings that a resume does not take ----------------------------------------------------------


SHOWN = (bool, int, float, str)


def not_taken(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Name the settings that the program has changed since the checkpoint's training began."""
    if not saved:  # of an earlier version
        return ""
    groups = list(zip(saved.get("optimizer") or [], now["optimizer"], strict=False))
    changes = list(dict.fromkeys(text for pair in groups for text in changed(*pair)))
    changes += changed(saved.get("scheduler") or {}, now["scheduler"] or {})
    return ", ".join(changes)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key, value in now.items():
        if key in HOW or key.startswith("_") or key not in before or same(before[key], value):
            continue
        shown = isinstance(value, SHOWN) and isinstance(before[key], SHOWN)
        yield f"{key} {number(before[key])}, not {number(value)}" if shown else key


def same(before: Any, now: Any) -> bool:
    """Compare, where one side went through JSON, which has no tuples."""
    if isinstance(now, (list, tuple)):
        alike = isinstance(before, (list, tuple)) and len(before) == len(now)
        return alike and all(same(*pair) for pair in zip(before, now, strict=True))
    return bool(before == now)


def number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
