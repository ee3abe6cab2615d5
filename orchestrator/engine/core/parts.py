"""Hold together the model on its ranks and what trains it, and what is saved of them."""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config.schema import Config
from orchestrator.engine.core.optimizer import HOW, LrScheduler
from orchestrator.engine.core.step import Stepper
from orchestrator.engine.core.stopping import TrainState
from orchestrator.engine.models.losses import Loss
from orchestrator.engine.ranks import agreement, plain_names
from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.saving import ownership, weights
from orchestrator.engine.saving.checkpoint import Checkpoints
from orchestrator.engine.saving.in_memory.memory_checkpoint import decoded, encoded
from orchestrator.engine.sharding import mesh
from orchestrator.engine.sharding.mesh import Mesh, plain_class

# -- what a program keeps besides model and optimizer ----------------------------------------------


# What torch and pickle raise for what is no data, or not safe to be read again.
NOT_READ = (pickle.PickleError, AttributeError, RuntimeError, TypeError, ValueError)


class AuxiliaryState:
    """Hold the optimizer's state, and what a program keeps: dicts, or objects with state_dict()."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.holders: dict[str, Any] = {}
        self.primed: dict[str, dict[str, Tensor]] | None = None  # what a resume is to fill

    def add(self, name: str, holder: Any) -> None:
        loads = hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")
        if not name or not isinstance(name, str) or name in self.holders:
            raise UsageError(f"keep({name!r}, ...): each thing needs a name of its own")
        if not isinstance(holder, dict) and not loads:
            raise UsageError(
                f"keep({name!r}, ...): a {type(holder).__name__} cannot be saved",
                "give a dict, or an object with state_dict() and load_state_dict()",
            )
        if not holder and isinstance(holder, dict):
            raise UsageError(
                f"keep({name!r}, ...): the dict is empty, and a resume fills what is there",
                "make all of it first, with the weights as the Trainer has spread them:"
                " {n: w.detach().clone() for n, w in trainer.bare.named_parameters()}",
            )
        encode(name, holder)
        self.holders[name] = holder

    # -- as a checkpoint asks for it, together with the optimizer -------------------------------

    def state(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.stepper.state():
            yield f"optim.{name}", value
        found = self.primed
        if found is None:
            found = {name: encode(name, holder)[1] for name, holder in self.holders.items()}
        for tensors in found.values():
            for path, tensor in tensors.items():
                yield f"kept.{path}", tensor

    def progress(self) -> dict[str, Any]:
        kept = {name: encode(name, holder)[0] for name, holder in self.holders.items()}
        return {**self.stepper.progress(), **({"kept": kept} if kept else {})}

    def prime(self, progress: Mapping[str, Any]) -> None:
        """Find the tensors that a checkpoint is to be read into."""
        self.stepper.prime(progress)
        saved, self.primed = progress.get("kept", {}), {}
        for name, holder in self.holders.items():
            if name not in saved:
                continue
            tensors = encode(name, holder)[1]
            other = sorted(set(tensors_of(saved[name])) ^ tensors.keys())
            if other:
                raise CheckFailed(
                    f"what is kept as {name!r} has other tensors than in the checkpoint: {other[0]}"
                    + (f" and {len(other) - 1} more" if other[1:] else ""),
                    "make all of it before train(), as it was when it was saved",
                )
            self.primed[name] = tensors

    def restore(self, progress: Mapping[str, Any]) -> None:
        self.stepper.restore(progress)
        primed, self.primed = self.primed or {}, None
        for name, tensors in primed.items():
            holder = self.holders[name]
            try:
                values = decoded(progress["kept"][name], tensors)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CheckFailed(f"what was kept as {name!r} makes no sense ({error})") from None
            if isinstance(holder, dict):
                holder.clear()
                holder.update(values)
            else:
                holder.load_state_dict(values)

    def lacking(self, progress: Mapping[str, Any]) -> list[str]:
        """Name what a checkpoint has nothing of."""
        saved = progress["stepper"].get("kept", {})
        return [name for name in self.holders if name not in saved]


class ExtraState:
    """Holds what modules have beside parameters and buffers: get_extra_state() gives it.

    It may be of another size at each time, so it is kept as text, and read as weights alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = {
            plain_names.plain(name): module
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def __bool__(self) -> bool:
        return bool(self.modules)

    def refused(self) -> str:
        """Say what cannot be read again, and is left out from now on."""
        found = []
        for name, module in list(self.modules.items()):
            try:
                read(written(module.get_extra_state()))
            except NOT_READ as error:
                del self.modules[name]
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                found.append(f"{name or 'the model'} ({plain_class(module).__name__}): {reason}")
        return "; ".join(found)

    def state_dict(self) -> dict[str, str]:
        return {name: written(module.get_extra_state()) for name, module in self.modules.items()}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        for name, module in self.modules.items():
            if name in state:
                module.set_extra_state(read(state[name]))


def written(value: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode("ascii")


def read(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)


def encode(name: str, holder: Any) -> tuple[Any, dict[str, Tensor]]:
    """Write what is kept as JSON that names its tensors."""
    tensors: dict[str, Tensor] = {}
    content = holder if isinstance(holder, dict) else holder.state_dict()
    return encoded(content, tensors, name, sharded=True), tensors


def tensors_of(value: Any) -> Iterator[str]:
    """Give the names of the tensors in such JSON."""
    if isinstance(value, dict) and isinstance(value.get("tensor"), str):
        yield value["tensor"]
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(inner)


@dataclass(frozen=True)
class Parts:
    """The model, spread over the ranks, and everything that trains it."""

    config: Config
    ranks: Ranks
    mesh: Mesh
    model: nn.Module  # spread over the ranks
    bare: nn.Module  # without what ddp puts around it
    losses: Loss
    stepper: Stepper

    @functools.cached_property
    def auxiliary(self) -> AuxiliaryState:
        """The optimizer's state, and what the program keeps beside it."""
        return AuxiliaryState(self.stepper)


# -- what a checkpoint has of them that is no tensor -----------------------------------------------


def save_checkpoint(
    checkpoints: Checkpoints,
    parts: Parts,
    state: TrainState,
    scheduler: LrScheduler,
    endless: bool,
) -> None:
    agreement.take_buffers_of_first(parts.bare)
    progress = {
        **progress_of(parts, state, scheduler, endless, checkpoints.run),
        "aliases": aliases_of(parts.bare),
        "configs": configs_of(parts.bare) if checkpoints.writers.first else {},
    }
    best = state.best is not None and state.best_step == state.step
    checkpoints.save(state.step, parts.bare, parts.auxiliary, progress, best=best)


def progress_of(
    parts: Parts, state: TrainState, scheduler: LrScheduler, endless: bool, run: ownership.Run
) -> dict[str, Any]:
    """Give all of the state that is no tensor, as JSON keeps it."""
    return {
        "step": state.step,
        "position": state.position,
        "tokens": state.tokens,
        "stepper": parts.auxiliary.progress(),
        "state": dataclasses.asdict(state),
        "scheduler": scheduler.state(),
        "given": {
            "optimizer": parts.stepper.initial_settings,
            "scheduler": scheduler.initial_settings,
        },
        "endless": endless,
        "run": dataclasses.asdict(run),
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
