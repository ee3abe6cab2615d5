"""Holds what a program keeps beside its model and optimizer: averages of weights, its own states.

Checkpoints and states in memory hold it. A resume fills its tensors in place, so they have to be
there by then, sharded as they will be; all else is given back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from orchestrator.engine.core.step import Stepper
from orchestrator.engine.saving.in_memory.memory_checkpoint import decoded, encoded
from orchestrator.errors import CheckFailed, UsageError


class Kept:
    """The holders by name: dicts, or objects with state_dict() and load_state_dict()."""

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
