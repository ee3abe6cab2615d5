"""Keep an exponential moving average of the weights, for evaluation in place of the weights.

The values are those of torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(). Each rank
averages its own shards. Buffers, and weights in no optimizer, stay those of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.engine.sharding.mesh import local_tensor

# Checkpoints store the average under this name.
KEPT = "ema"
WEIGHTS = "weights"


def name_of(optimizer: str) -> str:
    """Return the name of an optimizer's average in a checkpoint."""
    return f"{KEPT} {optimizer}".rstrip()


class Average:
    """The moving average of the parameters of one optimizer."""

    def __init__(self, decay: float, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.decay, self.parameters = decay, dict(named)
        self.weights = {name: parameter.detach().clone() for name, parameter in named}
        device = local_tensor(named[0][1]).device if named else None
        self.updates = torch.zeros((), device=device)

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's shards of the average, and of the weights."""
        mine = [local_tensor(weight) for weight in self.weights.values()]
        return mine, [local_tensor(parameter) for parameter in self.parameters.values()]

    @torch.no_grad()
    def update(self, bad: Tensor) -> None:
        """Update the average with the weights after a step, unless it was skipped (bad is 1.0).

        The first weights are copied. The host does not wait for a GPU.
        """
        mine, theirs = self._pairs()
        part = torch.where(self.updates == 0, 1.0, 1.0 - self.decay) * (1.0 - bad)
        for average, weight in zip(mine, theirs, strict=True):
            average.lerp_(weight, part.to(average.dtype))
        self.updates += 1.0 - bad.to(self.updates.device)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Swap the average into the model within the block, if there was a step to average."""
        if not self.updates.item():
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in zip(*self._pairs(), strict=True):
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)

    # -- state for checkpoints ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, WEIGHTS: self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates.copy_(state["updates"])
        for name, weight in self.weights.items():
            if (saved := state[WEIGHTS].get(name)) is not None and saved is not weight:
                weight.copy_(saved)
