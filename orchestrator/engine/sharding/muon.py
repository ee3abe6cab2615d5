"""Step torch.optim.Muon on matrices in shards: each rank orthogonalises whole ones.

Momentum and weights stay in shards. Muon rounds what it orthogonalises to bf16, in which a sum over
shards would show. It keeps no count of steps, so that all matrices may step a few at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from orchestrator.common.errors import UsageError

AT_ONCE = 8  # matrices that are whole at a time


def is_muon(optimizer: Optimizer) -> bool:
    return type(optimizer) is getattr(torch.optim, "Muon", None)  # torch 2.8 has none


def refuse_few_rows(optimizer: Optimizer) -> None:
    """Refuse matrices of which some rank has no row: torch does not change them by whole ones."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor):
                ranks = parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
                if len(parameter) < ranks:
                    raise UsageError(
                        f"Muon has a matrix of shape {tuple(parameter.shape)}, with fewer rows"
                        f" than the {ranks} ranks that share it",
                        "leave it to another optimizer: [Muon(matrices), AdamW(others)];"
                        ' or strategy="ddp" (fsdp.sharding_strategy)',
                    )


@torch.no_grad()
def step_on_shards(optimizer: Optimizer) -> None:
    """Call step() for a few matrices at a time, with whole gradients and momentum."""
    every = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = {parameter: parameter.grad for parameter in every}
    for parameter in every:
        parameter.grad = None
    for first in range(0, len(every), AT_ONCE):
        some = every[first : first + AT_ONCE]
        for parameter in some:
            state = optimizer.state[parameter]
            parameter.grad = placed(gradients[parameter])
            state.update({name: placed(value) for name, value in state.items()})
        optimizer.step()
        for parameter in some:
            state = optimizer.state[parameter]
            parameter.grad = None
            state.update({name: placed(value, parameter) for name, value in state.items()})


def placed(tensor: Any, like: Any = None) -> Any:
    """Return a tensor in the shards of another, or whole on each rank; one that is no DTensor, as
    it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = [Replicate()] * tensor.device_mesh.ndim
    return tensor.redistribute(placements=whole if like is None else like.placements)
