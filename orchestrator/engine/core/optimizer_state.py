"""The optimizer's state as a checkpoint has it: what state_dict() gives, load_state_dict() takes.

Parameters have their names there in the place of numbers. Tensors shaped like their parameter are
spread over the ranks as it is, whatever the ranks are; everything else is kept as it is.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_sharded
from torch.optim import Optimizer

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.engine.core.together import parts_of
from orchestrator.engine.ranks.ranks import gather
from orchestrator.engine.saving.state import DTYPES, decoded, encoded
from orchestrator.engine.sharding.by_owner import Owners, numbers_in, resumes_alike, set_numbers
from orchestrator.engine.sharding.mesh import Mesh, plain_of

HOW = ("fused", "foreach", "capturable", "differentiable")  # how it is computed, not what
WHOLE = "whole"  # beside a sharded parameter
# What an earlier version saved of each parameter, without a word about its tensors.
EARLIER = {
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
}


@dataclass
class Content:
    """Holds a state apart: JSON that names tensors, those tensors, and how to make them again."""

    text: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    forms: dict[str, list[Any]] = field(default_factory=dict)  # where it isn't the parameter's
    unsaved: list[str] = field(default_factory=list)

    def write(self, value: Any, path: str, parameter: Tensor | None = None) -> Any:
        """Give a value as JSON, and note its tensors."""
        tensors: dict[str, Tensor] = {}
        text = encoded(value, tensors, path, sharded=True)
        for name, tensor in zip(tensors, map(summed, tensors.values()), strict=True):
            self.tensors[name] = tensor
            if parameter is None or not alike(tensor, parameter):
                self.forms[name] = form_of(tensor, parameter)
        return text

    def entries(
        self, values: Mapping[Any, Any], path: str, parameter: Tensor | None = None
    ) -> dict[str, Any]:
        """Write what can be kept of some values, and name what can not."""
        written = {}
        for key, value in values.items():
            name = f"[{key}]" if type(key) is int else key
            value = plain_of(value) if isinstance(value, Tensor) else value  # noqa: PLW2901
            if isinstance(name, str) and key_of(name) == key:
                with contextlib.suppress(UsageError):
                    written[name] = self.write(value, f"{path}{key}", parameter)
            if name not in written:
                self.unsaved.append(f"{key} ({type(value).__name__})")
        return written


def key_of(name: str) -> str | int:
    """Give the key that JSON has as this text: it has no numbers for keys."""
    return int(name[1:-1]) if re.fullmatch(r"\[-?\d+\]", name) else name


def summed(tensor: Any) -> Any:
    """Add up what each rank has only a part of the sum of: nothing else can be saved."""
    if not isinstance(tensor, DTensor) or not any(p.is_partial() for p in tensor.placements):
        return tensor
    whole = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(placements=whole)


def alike(tensor: Tensor, parameter: Tensor) -> bool:
    mine, other = form_of(tensor, parameter), form_of(parameter, parameter)
    return mine == other and tensor.stride() == parameter.stride()


def form_of(tensor: Tensor, parameter: Tensor | None) -> list[Any]:
    """Describe a tensor, as JSON keeps it: dtype, shape, device, how it is sharded, and strides:
    what is multiplied in another order comes to other bits."""
    axis: int | str | None = WHOLE if isinstance(parameter, DTensor) else None
    if isinstance(tensor, DTensor):
        axis = axis_of(tensor)
    return [str(tensor.dtype), list(tensor.shape), tensor.device.type, axis, strides_of(tensor)]


def strides_of(tensor: Tensor) -> list[int] | None:
    return None if tensor.is_contiguous() else list(tensor.stride())


def small(tensor: Tensor) -> Tensor | None:
    """Give what is not worth being cut into shards."""
    return None if tensor.dim() and tensor.numel() else tensor.cpu()


def forms_of(progress: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Read such descriptions, also of earlier versions, which left torch's name out."""
    return {
        path: [form[0] if form[0] in DTYPES else f"torch.{form[0]}", *form[1:]]
        for path, form in progress.get("forms", {}).items()
    }


def axis_of(tensor: DTensor) -> int:
    last = tensor.placements[-1]
    return last.dim if isinstance(last, Shard) else -1


@dataclass(frozen=True)
class TensorFactory:
    """Make tensors that were saved again, as the ranks of today want them."""

    mesh: Mesh
    device: torch.device

    def empty(self, form: Sequence[Any], parameter: Tensor | None) -> Tensor:
        """Make a tensor of this form, spread as the ranks of today are."""
        dtype, shape, device, axis, strides = DTYPES[form[0]], *form[1:]
        if parameter is not None and shape == [*parameter.shape] and shape:
            if axis is None and isinstance(parameter, DTensor):
                axis = axis_of(parameter)
            spread = isinstance(parameter, DTensor) and axis == axis_of(parameter)
            if strides is None and (spread or not isinstance(parameter, DTensor)):
                return torch.empty_like(plain_of(parameter).detach(), dtype=dtype)
        if isinstance(axis, int) and self.mesh.mesh is not None:
            return self._in_shards(shape, dtype, axis, strides or range(len(shape), 0, -1))
        where = torch.device("cpu") if device == "cpu" else self.device
        if strides is not None:
            return torch.empty_strided(shape, strides, dtype=dtype, device=where)
        return torch.empty(shape, dtype=dtype, device=where)

    def _in_shards(
        self, shape: list[int], dtype: torch.dtype, axis: int, strides: Sequence[int]
    ) -> Tensor:
        """Make one whose dimensions lie in memory in the order of the strides."""
        order = sorted(range(len(shape)), key=lambda i: -strides[i])
        assert self.mesh.mesh is not None
        placements: list[Placement] = [Replicate()] * self.mesh.mesh.ndim
        if axis >= 0:
            placements[-1] = Shard(order.index(axis))
        size = [shape[i] for i in order]
        tensor: Tensor = empty_sharded(
            *size, dtype=dtype, device_mesh=self.mesh.mesh, placements=placements
        )
        return tensor.permute([order.index(i) for i in range(len(shape))])

    def target(self, form: Sequence[Any] | None, now: Tensor | None, like: Tensor | None) -> Tensor:
        """Give the tensor that a saved one is read into: the one that is there, if it fits."""
        if form is None:
            assert like is not None
            form = form_of(like.detach(), like)
        fits = now is not None and form[:2] == form_of(now, None)[:2]
        return now if now is not None and fits else self.empty(form, like)


def tensors_of(value: Any) -> Iterator[str]:
    """Give the names of the tensors in such JSON."""
    if isinstance(value, dict) and isinstance(value.get("tensor"), str):
        yield value["tensor"]
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(inner)


Numbers = dict[Any, Any]


@dataclass(frozen=True)
class Begun:
    """Tells state from what a program has given: how an optimizer was made."""

    settings: frozenset[str]  # the names of those of its groups
    numbers: list[Numbers]  # its attributes, and those of each of its parts

    @classmethod
    def now(cls, optimizer: Optimizer) -> Begun:
        settings = frozenset(key for group in optimizer.param_groups for key in group)
        return cls(settings, [numbers_in(vars(part)) for part in parts_of(optimizer)])


def changed(before: Numbers, now: Numbers) -> Numbers:
    return {
        key: value
        for key, value in now.items()
        if key not in before or items_of(value) != items_of(before[key])
    }


def items_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: items_of(inner) for key, inner in value.items()}
    return summed(value).item() if isinstance(value, Tensor) else value


class OptimizerState:
    """The state of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        named: Sequence[tuple[str, nn.Parameter]],
        factory: TensorFactory,
        *,
        keeps_settings: bool,
        owners: Sequence[Owners] = (),  # of parameters whose state one rank has
        begun: Begun | None = None,  # if it has stepped already
    ) -> None:
        self.optimizer, self.parameters, self.factory = optimizer, dict(named), factory
        self.keeps_settings = keeps_settings
        known = {id(parameter): name for name, parameter in named}
        own = (known[id(p)] for group in optimizer.param_groups for p in group["params"])
        self.names = dict(enumerate(own))
        self.begun = begun or Begun.now(optimizer)
        self.owners = {known[id(p)]: each for each in owners for p in each.sharded}
        self.ids = {name: id(parameter) for name, parameter in named}

    def content(self) -> Content:
        """Give all of it as JSON and tensors: the very tensors that train."""
        content, settings = Content(), Content()
        more = dict(self.optimizer.state_dict())
        numbered = is_numbered(more)
        state = more.pop("state") if numbered else {}
        groups = more.pop("param_groups") if numbered else []
        own = {
            name: content.entries(state[number], f"{name}.", self.parameters[name])
            for number, name in self.names.items()
            if state.get(number)
        }
        content.text = {
            "state": self._of_all_owners(own, content) if self.owners else own,
            "shared": content.entries(
                {key: value for key, value in state.items() if key not in self.names}, "shared "
            ),
            "more": content.entries(more, "more "),
            "attributes": [
                content.entries(changed(before, numbers_in(vars(part))), f"attribute {i} ")
                for i, (part, before) in enumerate(self._with_attributes())
            ],
            "groups": [
                settings.entries({k: v for k, v in group.items() if k != "params"}, f"group {i} ")
                for i, group in enumerate(groups)
            ],
        }
        content.tensors |= settings.tensors
        content.forms |= settings.forms
        # What JSON has not of settings is code, such as a function; but steps add state to them.
        given = self.begun.settings
        content.unsaved += [n for n in settings.unsaved if n.rpartition(" (")[0] not in given]
        return content

    def _with_attributes(self) -> Iterator[tuple[Optimizer, Numbers]]:
        """Give the parts that count something themselves, beside what state_dict() gives: code of
        libraries and programs does, torch's own does not."""
        for part, before in zip(parts_of(self.optimizer), self.begun.numbers, strict=True):
            if packages_of(part):
                yield part, before

    def _of_all_owners(self, own: dict[str, Any], content: Content) -> dict[str, Any]:
        """Put together what owners have of the state, tensors in shards. Every rank calls it."""
        mine = {name: own.pop(name) for name in [*own] if name in self.owners}
        paths = {path: name for name, text in mine.items() for path in tensors_of(text)}
        whole = {path: content.tensors.pop(path) for path in paths}
        for path in paths:
            content.forms.pop(path, None)
        described = {
            path: (tensor.dtype, [*tensor.shape], paths[path], small(tensor), strides_of(tensor))
            for path, tensor in whole.items()
        }
        texts: dict[str, Any] = {}
        forms: dict[str, Any] = {}
        for texts_there, forms_there, unsaved in gather((mine, described, content.unsaved)):
            texts |= texts_there
            forms |= forms_there
            content.unsaved = list(dict.fromkeys([*content.unsaved, *unsaved]))
        for owners in dict.fromkeys(self.owners.values()):
            cut = {
                path: (dtype, shape, owners.owner[self.ids[name]])
                for path, (dtype, shape, name, value, _strides) in sorted(forms.items())
                if value is None and self.owners[name] is owners
            }
            content.tensors |= owners.in_shards(whole, cut)
        for path, (_dtype, _shape, name, value, strides) in sorted(forms.items()):
            if value is not None:
                content.tensors[path] = whole.get(path, value)
            like = self.parameters[name]
            if strides is not None or not alike(content.tensors[path], like):
                form = form_of(content.tensors[path], like)
                content.forms[path] = [*form[:4], strides]  # in shards it is contiguous
        return {name: {**own, **texts}[name] for name in self.names.values() if name in own | texts}

    def _with_owners(self, text: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        """Bring what was saved of the state to its owners; the others have none of it."""
        found = {name: inner for name, inner in text.items() if name not in self.owners}
        whole = dict(tensors)
        for owners in dict.fromkeys(self.owners.values()):
            names = [n for n, each in self.owners.items() if each is owners and n in text]
            place = {name: owners.owner[self.ids[name]] for name in names}
            paths = {path: place[name] for name in names for path in tensors_of(text[name])}
            whole |= owners.whole(tensors, paths)
            found |= {name: text[name] for name in names if place[name] == owners.rank}
        return found, whole

    def targets(self, progress: Mapping[str, Any]) -> dict[str, Tensor]:
        """Give the tensors that the saved ones are to be read into."""
        text, forms = saved(progress)
        now = {} if self.owners else self.content().tensors  # what owners have is in no shards
        found = {}
        for name, like in self.parameters.items():
            for path in tensors_of(text["state"].get(name)):
                found[path] = self.factory.target(forms.get(path), now.get(path), like)
        rest = [text[key] for key in ("shared", "groups", "more", "attributes") if key in text]
        for path in tensors_of(rest):
            found[path] = self.factory.target(forms[path], now.get(path), None)
        return found

    def load(self, progress: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        text, now = saved(progress)[0], dict(self.optimizer.state_dict())
        groups = now["param_groups"] if is_numbered(now) else []
        if len(groups) != len(text["groups"]):
            raise CheckFailed(
                f"the checkpoint's optimizer has {len(text['groups'])} groups of parameters,"
                f" this one {len(groups)}"
            )
        states = text["state"]
        if self.owners:
            states, tensors = self._with_owners(states, tensors)
        values = functools.partial(values_of, tensors=tensors)
        now |= values(text["more"])
        state = {
            number: values(states[name]) for number, name in self.names.items() if name in states
        }
        if groups:
            settings = [values(group) for group in text["groups"]]
            pairs = zip(groups, settings, strict=True)
            now["param_groups"] = [self._settings(*pair) for pair in pairs]
            now["state"] = state | values(text["shared"])
        self.optimizer.load_state_dict(now)
        self._as_they_were(state)
        counted = map(values, text.get("attributes", []))
        with torch.no_grad():
            for (part, _), numbers in zip(self._with_attributes(), counted, strict=False):
                set_numbers(vars(part), numbers, alone=False)

    def _settings(self, now: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """Choose the settings of a group: those that were saved, but for how it is computed."""
        fixed = {key: now[key] for key in ("params", *HOW) if key in now}
        return {**now, **({} if self.keeps_settings else saved), **fixed}

    def _as_they_were(self, before: Mapping[int, Mapping[str, Any]]) -> None:
        """Undo what load_state_dict() does to state that is finer than its parameter, which it
        rounds, to texts, which it takes for lists, and to queues, which it leaves unbounded."""
        loaded = self.optimizer.state_dict().get("state", {})
        for number, values in before.items():
            now = loaded.get(number, {})
            now |= {key: value for key, value in values.items() if is_changed(key, value, now)}


def is_changed(key: Any, value: Any, loaded: Any) -> bool:
    """Tell whether loading has changed a value, or something inside it; a count of steps may be."""
    other = loaded.get(key) if isinstance(loaded, dict) else None
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and other.dtype != value.dtype and key != "step"
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
        other = dict(enumerate(other)) if isinstance(other, (list, tuple)) else None
    if isinstance(value, dict):
        return any(is_changed(inner, value[inner], other) for inner in value)
    return isinstance(value, (str, deque))


class Rehearsal:
    """A resume of a copy of an optimizer, on small tensors: what could not be saved, and whether it
    would go on to the bit."""

    def __init__(self, factory: TensorFactory) -> None:
        self.factory = factory
        self.unsaved: list[str] = []
        self.problem = ""

    def run(self, part: Optimizer, on_shards: Callable[[], Any], *, owned: bool) -> None:
        if not resumes_alike(part, on_shards, self._resumed, owned=owned):
            self.problem = f"what {type(part).__name__} saves is not all that its steps depend on"

    def _resumed(self, own: Optimizer, other: Optimizer) -> Optimizer:
        new = self._of(other, None)
        content = self._of(own, new.begun).content()
        self.unsaved += content.unsaved
        text = {"text": json.loads(json.dumps(content.text)), "forms": content.forms}
        tensors = {path: tensor.clone() for path, tensor in content.tensors.items()}
        try:
            new.load({"optimizer": text}, tensors)
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            self.problem = f"{type(own).__name__} does not read it: {type(error).__name__} {reason}"
            raise
        return other

    def _of(self, copy: Optimizer, begun: Begun | None) -> OptimizerState:
        every = [parameter for group in copy.param_groups for parameter in group["params"]]
        named = [(str(number), parameter) for number, parameter in enumerate(every)]
        return OptimizerState(copy, named, self.factory, keeps_settings=False, begun=begun)

    def of_all_ranks(self) -> Rehearsal:
        found = gather((self.unsaved, self.problem))
        self.unsaved = [name for names, _ in found for name in names]
        self.problem = next((problem for _, problem in found if problem), "")
        return self


# -- of several optimizers -------------------------------------------------------------------------


BY_NAME = "by name"


def by_name(values: Mapping[str, Any]) -> Any:
    """Give what a checkpoint has of all optimizers: of a single one, which has no name, its own."""
    return values[""] if "" in values else {BY_NAME: dict(values)}


def of_name(saved: Any, name: str) -> Any:
    """Take from that what is of one optimizer; None if there is nothing of it."""
    several = isinstance(saved, Mapping) and BY_NAME in saved
    if not name:
        return None if several else saved
    return saved[BY_NAME].get(name) if several else None


def is_numbered(state: Mapping[str, Any]) -> bool:
    """Tell whether it is laid out as torch's own state_dict(): an optimizer may have another."""
    return {"state", "param_groups"} <= state.keys()


def values_of(text: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {key_of(key): decoded(value, tensors) for key, value in text.items()}


def packages_of(value: Any) -> frozenset[str]:
    """Name the packages that an object's classes are of, as far as they are a program's own."""
    modules = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return frozenset(modules - {"builtins", "torch"})


def saved(progress: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, list[Any]]]:
    """Read what a checkpoint has of the optimizer, also one of an earlier version."""
    if "optimizer" in progress:
        return progress["optimizer"]["text"], forms_of(progress["optimizer"])
    kind = progress.get("class", "")
    if kind not in EARLIER:
        raise CheckFailed(
            f"an earlier version saved this optimizer ({kind}) without saying what its tensors are",
            "resume with that version; its weights alone: orchestrator checkpoint export",
        )
    names, groups = progress["stateful"], progress["groups"]
    keys = [*EARLIER[kind], *["max_exp_avg_sq" for group in groups if group.get("amsgrad")][:1]]
    text = {
        "state": {name: {key: {"tensor": f"{name}.{key}"} for key in keys} for name in names},
        "shared": {},
        "more": {},
        "groups": [Content().entries(group, "") for group in groups],
    }
    return text, {f"{name}.step": ["torch.float32", [], "cpu", None, None] for name in names}
