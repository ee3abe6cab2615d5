"""A user's optimizer on the parameters as they lie over the ranks. Called by trainer.py.

Users make an optimizer over the whole model, before anything is sharded. Here its groups and its
state move to the sharded parameters (DTensors, so that an optimizer that is not elementwise is
either right or refuses), and a step is made of summed gradients: divided, clipped, or skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import LBFGS, Optimizer

from orchestrator.engine.core.optim import FIRST_SCALE, GROW_AFTER, local_tensor
from orchestrator.errors import CheckFailed, UsageError

Factory = Callable[[list[nn.Parameter]], Optimizer]
LEAST_SCALE, LARGEST_SCALE = 2.0**-24, 2.0**24


def names_of(model: nn.Module) -> dict[int, str]:
    """Which parameter is which, to be asked before the model is sharded."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


class Bound:
    """What checkpoint.py asks of a stepper, over any optimizer."""

    def __init__(
        self, made: Optimizer | Factory, names: Mapping[int, str], model: nn.Module, low: str
    ) -> None:
        self.now = dict(model.named_parameters())
        self.optimizer = made if isinstance(made, Optimizer) else self._made(made)
        if isinstance(made, Optimizer):
            self._move(names)
        if isinstance(self.optimizer, LBFGS):
            raise UsageError(
                "LBFGS evaluates the loss several times per step, which the Trainer does not",
                "use another optimizer",
            )
        known = {id(parameter): name for name, parameter in self.now.items()}
        groups = self.optimizer.param_groups
        self.named = [(known[id(p)], p) for group in groups for p in group["params"]]
        self.scaling = low == "fp16"
        self.scale = FIRST_SCALE / 64 if self.scaling else 1.0  # losses are sums here
        self.good = self.skipped = 0

    def _made(self, factory: Factory) -> Optimizer:
        wanted = [parameter for parameter in self.now.values() if parameter.requires_grad]
        made = factory(wanted)
        if not isinstance(made, Optimizer):
            raise UsageError(
                f"optimizer gave a {type(made).__name__}, not a torch optimizer",
                "give torch.optim.AdamW(model.parameters()), or a function of the parameters",
            )
        return made

    def _move(self, names: Mapping[int, str]) -> None:
        """From the parameters that it was made for to those that lie there now."""
        for group in self.optimizer.param_groups:
            strangers = [p for p in group["params"] if id(p) not in names]
            if strangers:
                raise UsageError(
                    f"the optimizer holds a parameter of shape {tuple(strangers[0].shape)} that is"
                    " not the model's",
                    "make it from the parameters of the very model that you give to the Trainer",
                )
            for place, old in enumerate(group["params"]):
                new = group["params"][place] = self.now[names[id(old)]]
                state = self.optimizer.state.pop(old, None)
                if state:
                    self.optimizer.state[new] = {
                        key: as_it_lies(value, old, new) for key, value in state.items()
                    }

    # -- a step -------------------------------------------------------------------------------

    def squares(self) -> Tensor:
        """Of this rank's gradients, for the norm of the whole."""
        grads = [grad for grad in self._grads() if grad.numel()]
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=self._device())
        return torch.stack(torch._foreach_norm(grads)).double().square().sum()

    def step(self, factor: float, *, lr: float) -> None:
        """With gradients times `factor` and learning rates times `lr`."""
        if grads := self._grads():
            torch._foreach_mul_(grads, factor)
        groups = self.optimizer.param_groups
        base = [clone(group["lr"]) for group in groups]
        for group, own in zip(groups, base, strict=True):
            set_lr(group, own * lr)
        self.optimizer.step()
        for group, own in zip(groups, base, strict=True):
            set_lr(group, own)  # a scheduler of the user's reckons with its own
        self.good += 1
        if self.scaling and self.good >= GROW_AFTER:
            self.scale, self.good = min(self.scale * 2, LARGEST_SCALE), 0

    def skip(self) -> bool:
        """Whether it was only fp16 that overflowed, which a smaller scale will cure."""
        self.skipped, self.good = self.skipped + 1, 0
        curable = self.scaling and self.scale > LEAST_SCALE
        self.scale /= 2 if curable else 1
        return curable

    def forget(self) -> None:
        for parameter in self.now.values():
            parameter.grad = None

    def _grads(self) -> list[Tensor]:
        return [local_tensor(p.grad) for _, p in self.named if p.grad is not None]

    def _device(self) -> torch.device:
        return local_tensor(next(iter(self.now.values()))).device

    # -- what a checkpoint holds of it --------------------------------------------------------

    def state(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{name}.{key}", value

    def prime(self, progress: Mapping[str, Any]) -> None:
        """Make the state that the saved optimizer had, to be read into."""
        if "stateful" not in progress:
            raise CheckFailed("the checkpoint is one of the built-in engine, not of a Trainer")
        had = set(progress["stateful"])
        for name, parameter in self.named:
            if name not in had:
                self.optimizer.state.pop(parameter, None)
            elif not self.optimizer.state.get(parameter):
                parameter.grad = torch.zeros_like(parameter)
        base = [clone(group["lr"]) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            set_lr(group, clone(group["lr"]) * 0)
        self.optimizer.step()
        for group, own in zip(self.optimizer.param_groups, base, strict=True):
            set_lr(group, own)
        self.forget()

    def progress(self) -> dict[str, Any]:
        state = self.optimizer.state
        plain = {
            name: {k: v for k, v in state.get(p, {}).items() if isinstance(v, (int, float))}
            for name, p in self.named
        }
        return {
            "stateful": [name for name, p in self.named if state.get(p)],
            "plain": {name: values for name, values in plain.items() if values},
            "groups": [
                {key: value for key, value in map(as_number, group.items()) if is_plain(value)}
                for group in self.optimizer.param_groups
            ],
            **{"scale": self.scale, "good": self.good, "skipped": self.skipped},
        }

    def restore(self, progress: Mapping[str, Any]) -> None:
        groups = self.optimizer.param_groups
        if len(groups) != len(progress["groups"]):
            raise CheckFailed(
                f"the checkpoint's optimizer has {len(progress['groups'])} groups of parameters,"
                f" this one {len(groups)}"
            )
        for group, saved in zip(groups, progress["groups"], strict=True):
            for key, value in saved.items():
                if key == "lr":
                    set_lr(group, value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value
        for name, parameter in self.named:
            self.optimizer.state[parameter].update(progress["plain"].get(name, {}))
        self.scale, self.good = progress["scale"], progress["good"]
        self.skipped = progress["skipped"]


def as_it_lies(value: Any, old: Tensor, new: Tensor) -> Any:
    """State that is as large as its parameter lies as the parameter does."""
    if not isinstance(value, Tensor) or value.shape != old.shape or not value.dim():
        return value
    if isinstance(new, DTensor):
        return distribute_tensor(value.to(new.device), new.device_mesh, new.placements)
    return value.to(new.device)


def clone(lr: Any) -> Any:
    return lr.clone() if isinstance(lr, Tensor) else lr


def set_lr(group: dict[str, Any], value: Any) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


def as_number(item: tuple[str, Any]) -> tuple[str, Any]:
    key, value = item
    return key, value.item() if isinstance(value, Tensor) and not value.dim() else value


def is_plain(value: Any) -> bool:
    """What JSON keeps as it is."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(one, (int, float)) for one in value)
    return value is None or isinstance(value, (bool, int, float, str))
