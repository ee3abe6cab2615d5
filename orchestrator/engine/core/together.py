"""Make one optimizer of several that train parts of one model by one loss: Muon beside AdamW.

They share their groups and their state with it: a learning rate is set, and a state saved, as that
of one optimizer. Each does its own part of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from orchestrator.common.errors import UsageError
from orchestrator.engine.models.import_by_name import kind
from orchestrator.engine.sharding import muon

FOR_EXAMPLE = (
    "give optimizers of torch's, each over parameters of its own:"
    " [torch.optim.Muon(matrices), torch.optim.AdamW(others)]"
)


class Together(Optimizer):
    """Several optimizers that step one after the other."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in self.parts:
            self.state.update(part.state)
        self._share()

    def _share(self) -> None:
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            groups = self.param_groups[first:last]
            part.state, part.param_groups = self.state, groups
            first = last

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Hand on what load_state_dict() has read."""
        super().__setstate__(state)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            step(part)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


def one_of_several(optimizer: Any) -> Any:
    """Make one of a list of optimizers; leave what is no list."""
    if not isinstance(optimizer, (list, tuple)):
        return optimizer
    seen: set[int] = set()
    for part in optimizer:
        if not isinstance(part, Optimizer):
            raise UsageError(f"optimizer= is a list with {kind(part)} in it", FOR_EXAMPLE)
        for name in ("state_dict", "load_state_dict", "add_param_group"):
            if getattr(type(part), name) is not getattr(Optimizer, name):
                raise UsageError(
                    f"{type(part).__name__} has a {name}() of its own, which a list of optimizers"
                    " would not call",
                    "give it alone, or let each train a model of its own: models=, optimizers=",
                )
        mine = {id(parameter) for group in part.param_groups for parameter in group["params"]}
        if mine & seen:
            raise UsageError("a parameter is in two optimizers of the list", FOR_EXAMPLE)
        seen |= mine
    names = "+".join(type(part).__name__ for part in optimizer)
    return type(names, (Together,), {"__module__": __name__})(optimizer)


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """List the optimizers that it is made of; most are only themselves."""
    return optimizer.parts if isinstance(optimizer, Together) else [optimizer]


def step(optimizer: Optimizer) -> None:
    """Call step() of an optimizer, whose matrices may be in shards."""
    groups = optimizer.param_groups
    if muon.is_muon(optimizer) and any(isinstance(p, DTensor) for g in groups for p in g["params"]):
        muon.step_on_shards(optimizer)
    else:
        optimizer.step()
