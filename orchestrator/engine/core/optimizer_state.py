"""The optimizer's state as a checkpoint has it: what state_dict() gives, load_state_dict() takes.

Parameters have their names there in place of numbers. torch's get_optimizer_state_dict() does so
as well, but it takes a step to make state that is not there, which an optimizer of a program's own
would count.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.engine.saving.state import decoded, encoded

HOW = ("fused", "foreach", "capturable", "differentiable")  # how it is computed, not what
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
Form = Sequence[Any]  # dtype, shape and kind of device of a tensor, as JSON keeps it


@dataclass
class Content:
    """A state taken apart: JSON that names tensors, those tensors, and how to make them again."""

    text: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    forms: dict[str, Form] = field(default_factory=dict)  # of those unlike their parameter
    unsaved: list[str] = field(default_factory=list)

    def write(self, value: Any, path: str, parameter: Tensor | None = None) -> Any:
        """Return a value as JSON, and keep its tensors."""
        tensors: dict[str, Tensor] = {}
        text = encoded(value, tensors, path)
        self.tensors |= tensors
        for name, tensor in tensors.items():
            if parameter is None or form_of(tensor) != form_of(parameter):
                self.forms[name] = form_of(tensor)
        return text

    def entries(
        self, values: Mapping[Any, Any], path: str, parameter: Tensor | None = None
    ) -> dict[str, Any]:
        """Write the values that can be kept, and name those that cannot."""
        written = {}
        for key, value in values.items():
            if isinstance(key, str):
                with contextlib.suppress(UsageError):
                    written[key] = self.write(value, f"{path}{key}", parameter)
            if key not in written:
                self.unsaved.append(f"{key} ({type(value).__name__})")
        return written


def form_of(tensor: Tensor) -> Form:
    return [str(tensor.dtype), list(tensor.shape), tensor.device.type]


def target(
    form: Form | None, now: Tensor | None, like: Tensor | None, device: torch.device
) -> Tensor:
    """Return the tensor that a saved one is read into: the present one if it fits, or a new one,
    spread over the ranks as its parameter if it has the shape of that."""
    form = form_of(like) if form is None and like is not None else form
    assert form is not None
    dtype, shape, kind = DTYPES[form[0]], list(form[1]), form[2]
    if now is not None and [now.dtype, list(now.shape)] == [dtype, shape]:
        return now
    if like is not None and shape and shape == list(like.shape):
        return torch.empty_like(like.detach(), dtype=dtype)
    return torch.empty(shape, dtype=dtype, device="cpu" if kind == "cpu" else device)


def tensors_of(value: Any) -> Iterator[str]:
    """Return the names of the tensors in such JSON."""
    if isinstance(value, dict) and isinstance(value.get("tensor"), str):
        yield value["tensor"]
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(inner)


class OptimizerState:
    """The state of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        named: Sequence[tuple[str, nn.Parameter]],
        device: torch.device,
        *,
        keeps_settings: bool,
    ) -> None:
        self.optimizer, self.parameters, self.device = optimizer, dict(named), device
        self.keeps_settings = keeps_settings
        known = {id(parameter): name for name, parameter in named}
        own = (known[id(p)] for group in optimizer.param_groups for p in group["params"])
        self.names = dict(enumerate(own))
        # What a program gives an optimizer may be code; steps add only state.
        self.settings = frozenset(key for group in optimizer.param_groups for key in group)

    def content(self) -> Content:
        """Return all of it as JSON and tensors: the very tensors that train."""
        content, settings = Content(), Content()
        more = dict(self.optimizer.state_dict())
        state, groups = more.pop("state", {}), more.pop("param_groups", [])
        content.text = {
            "state": {
                name: content.entries(state[number], f"{name}.", self.parameters[name])
                for number, name in self.names.items()
                if state.get(number)
            },
            "shared": content.entries(
                {key: value for key, value in state.items() if key not in self.names}, "shared "
            ),
            "more": content.entries(more, "more "),
            "groups": [
                settings.entries({k: v for k, v in group.items() if k != "params"}, f"group {i} ")
                for i, group in enumerate(groups)
            ],
        }
        content.tensors |= settings.tensors
        content.forms |= settings.forms
        content.unsaved += [n for n in settings.unsaved if n.split(" (")[0] not in self.settings]
        return content

    def targets(self, progress: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors that the saved ones are to be read into."""
        text, forms = progress["optimizer"]["text"], progress["optimizer"]["forms"]
        now = self.content().tensors
        likes: dict[str, Tensor | None] = dict.fromkeys(tensors_of([*text.values()]))
        for name, parameter in self.parameters.items():
            likes |= dict.fromkeys(tensors_of(text["state"].get(name)), parameter)
        return {
            path: target(forms.get(path), now.get(path), like, self.device)
            for path, like in likes.items()
        }

    def load(self, progress: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        text, now = progress["optimizer"]["text"], dict(self.optimizer.state_dict())
        groups, states = now.get("param_groups", []), text["state"]
        if len(groups) != len(text["groups"]):
            raise CheckFailed(
                f"the checkpoint's optimizer has {len(text['groups'])} groups of parameters,"
                f" this one {len(groups)}"
            )
        values = functools.partial(values_of, tensors=tensors)
        now |= values(text["more"])
        if groups:
            pairs = zip(groups, map(values, text["groups"]), strict=True)
            now["param_groups"] = [self._settings(*pair) for pair in pairs]
            now["state"] = values(text["shared"]) | {
                number: values(states[name])
                for number, name in self.names.items()
                if name in states
            }
        self.optimizer.load_state_dict(now)

    def _settings(self, now: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """Choose the settings of a group: those that were saved, but for how it is computed."""
        fixed = {key: now[key] for key in ("params", *HOW) if key in now}
        return {**now, **({} if self.keeps_settings else saved), **fixed}


def values_of(text: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {key: decoded(value, tensors) for key, value in text.items()}


# -- of several optimizers -------------------------------------------------------------------------


BY_NAME = "by name"


def by_name(values: Mapping[str, Any]) -> Any:
    """Return what a checkpoint has of all optimizers: of one without a name, its own alone."""
    return values[""] if "" in values else {BY_NAME: dict(values)}


def of_name(saved: Any, name: str) -> Any:
    """Return the part of one optimizer of that, or None."""
    several = isinstance(saved, Mapping) and BY_NAME in saved
    if not name:
        return None if several else saved
    return saved[BY_NAME].get(name) if several else None
