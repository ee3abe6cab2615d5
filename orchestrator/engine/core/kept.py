"""The state in a checkpoint beside the model: optimizers, and objects that a program registers.

Each object is saved by state_dict() and restored by load_state_dict(). A saved value is JSON that
names its tensors, which a load reads in place. torch's get_optimizer_state_dict() is not used: it
takes a step to create missing state, and Adam would count that step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.engine.core.optimizer import HOW, parameters_of
from orchestrator.engine.core.step import Stepper, Steppers
from orchestrator.engine.saving.state import decode_state, encode_state

# The position in the data is saved under this name.
WHAT_IS_DRAWN = "what is drawn"


class Snapshot(NamedTuple):
    """The state beside the model at one moment: the tensors themselves, and JSON naming them."""

    tensors: dict[str, Tensor]
    progress: dict[str, Any]


class OptimizerState:
    """The state of an optimizer, by the names of its parameters instead of their numbers."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper, self.optimizer = stepper, stepper.optimizer
        # The prefix of its tensors' names in a checkpoint.
        self.place = f"optim {stepper.name}".rstrip()
        known = {id(parameter): name for name, parameter in stepper.named}
        self.names = [known[id(parameter)] for parameter in parameters_of(self.optimizer)]
        self.likes = {repr(name): parameter for name, parameter in stepper.named}

    def state_dict(self) -> dict[str, Any]:
        more = dict(self.optimizer.state_dict())
        state, groups = more.pop("state", {}), more.pop("param_groups", [])
        numbered = dict(enumerate(self.names))
        return {
            "state": {name: state[n] for n, name in numbered.items() if state.get(n)},
            "shared": {key: value for key, value in state.items() if key not in numbered},
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in groups],
            "more": more,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        now = {**self.optimizer.state_dict(), **saved["more"]}
        groups = now.get("param_groups", [])
        if len(groups) != len(saved["groups"]):
            raise CheckFailed(
                f"the checkpoint's optimizer has {len(saved['groups'])} groups of parameters,"
                f" this one {len(groups)}"
            )
        if groups:
            pairs = zip(groups, saved["groups"], strict=True)
            now["param_groups"] = [self._settings(*pair) for pair in pairs]
            states = saved["state"]
            own = {n: states[name] for n, name in enumerate(self.names) if name in states}
            now["state"] = saved["shared"] | own
        self.optimizer.load_state_dict(now)

    def _settings(self, now: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a group: the saved ones, apart from the kernel choice (HOW)."""
        fixed = {key: now[key] for key in ("params", *HOW) if key in now}
        return {**now, **({} if self.stepper.keeps_settings else saved), **fixed}

    def like(self, path: str) -> Tensor | None:
        """Return the parameter that a state tensor belongs to, or None."""
        return self.likes.get(path.removeprefix(f"{self.place}['state'][").partition("][")[0])


class AuxiliaryState:
    """The optimizers' state, and the dicts or objects with state_dict() that a program keeps."""

    def __init__(self, steppers: Steppers) -> None:
        self.steppers = steppers
        self.optimizers = {stepper.name: OptimizerState(stepper) for stepper in steppers}
        self.holders: dict[str, Any] = {}
        # The tensors that a resume reads into.
        self.primed: dict[str, Tensor] = {}

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
        # This raises for values that cannot be saved.
        encode_state(content_of(holder), {}, name)
        self.holders[name] = holder

    # -- saving and loading ------------------------------------------------------------------------

    def refuse_unsavable(self) -> None:
        """Refuse an optimizer whose state no checkpoint can hold."""
        for state in self.optimizers.values():
            encode_state(
                state.state_dict(), {}, f"the optimizer ({type(state.optimizer).__name__})"
            )

    def snapshot(self) -> Snapshot:
        """Return the present state of all holders.

        state_dict() is called once per holder, because an optimizer may gather its state in it.
        """
        tensors: dict[str, Tensor] = {}
        optimizers = {
            name: {
                **state.stepper.progress(),
                "state": encode_state(state.state_dict(), tensors, state.place),
            }
            for name, state in self.optimizers.items()
        }
        kept = {
            name: encode_state(content_of(holder), tensors, f"kept.{name}")
            for name, holder in self.holders.items()
        }
        return Snapshot(tensors, {"optimizers": optimizers, "kept": kept})

    def prime(self, progress: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Return the tensors to read a checkpoint into; `saved` is DCP's metadata of each."""
        if "optimizers" not in progress:
            raise CheckFailed(
                "the checkpoint is one of an earlier version",
                "its weights alone: orchestrator checkpoint export",
            )
        refuse_other_optimizers(self.steppers, progress["optimizers"])
        now, self.primed = self.snapshot().tensors, {}
        for name, own in progress["optimizers"].items():
            state = self.optimizers[name]
            state.stepper.refuse_other_class(own)
            for path in tensors_of(own["state"]):
                self._prime(path, now.get(path), saved.get(path), state.like(path))
        for name, text in progress["kept"].items():
            wanted = set(tensors_of(text)) if name in self.holders else set()
            here = {path for path in now if path.startswith(f"kept.{name}[")}
            if isinstance(self.holders.get(name), dict) and wanted != here:
                raise CheckFailed(
                    f"what is kept as {name!r} has other tensors than in the checkpoint:"
                    f" {min(wanted ^ here)}",
                    "make all of it before train(), as it was when it was saved",
                )
            for path in wanted:
                self._prime(path, now.get(path), saved.get(path), None)
        return self.primed

    def _prime(self, path: str, now: Tensor | None, saved: Any, like: Tensor | None) -> None:
        """Use the present tensor if it fits, else create one that is sharded like its parameter."""
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckFailed(f"the checkpoint has no tensor {path}, which its progress names")
        dtype, shape = saved.properties.dtype, saved.size
        if now is not None and (now.dtype, now.shape) == (dtype, shape):
            self.primed[path] = now
        elif like is not None and shape and shape == like.shape:
            self.primed[path] = torch.empty_like(like.detach(), dtype=dtype)
        else:
            # torch counts steps in scalars on the CPU, and its load moves other tensors itself.
            device = self.steppers.device if shape else torch.device("cpu")
            self.primed[path] = torch.empty(shape, dtype=dtype, device=device)

    def restore(self, progress: Mapping[str, Any]) -> None:
        primed, self.primed = self.primed, {}
        for name, own in progress["optimizers"].items():
            state = self.optimizers[name]
            state.stepper.restore(own)
            state.load_state_dict(decode_state(own["state"], primed))
        for name, text in progress["kept"].items():
            holder = self.holders.get(name)
            if isinstance(holder, dict):
                values = decode_state(text, primed)
                holder.clear()
                holder.update(values)
            elif holder is not None:
                holder.load_state_dict(decode_state(text, primed))

    def differences(self, progress: Mapping[str, Any]) -> Iterator[str]:
        """Yield a message for each object that only the checkpoint or only this program keeps."""
        saved = progress["stepper"]["kept"].keys()
        for name in sorted(self.holders.keys() - saved - {WHAT_IS_DRAWN}):
            yield f"nothing of {name!r} was saved there: it stays as it is"
        for name in sorted(saved - self.holders.keys()):
            yield f"{name!r} was kept there, and this program keeps none: it is not read"


def refuse_other_optimizers(steppers: Steppers, saved: Mapping[str, Any]) -> None:
    if saved.keys() != steppers.by_name.keys():
        was, now = (
            ", ".join(filter(None, sorted(names))) or "one" for names in (saved, steppers.by_name)
        )
        raise CheckFailed(
            f"the checkpoint has other optimizers than this program: {was} there, {now} here",
            "resume with the optimizers that it was saved with, by the same names",
        )


def content_of(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else holder.state_dict()


def tensors_of(value: Any) -> Iterator[str]:
    """Yield the names of the tensors in an encoded value."""
    if isinstance(value, dict) and isinstance(value.get("tensor"), str):
        yield value["tensor"]
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(inner)
