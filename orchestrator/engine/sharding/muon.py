"""Step torch.optim.Muon on matrices in shards: each rank orthogonalises whole ones.

Momentum and weights stay in shards. Muon rounds what it orthogonalises to bf16, in which a sum over
shards would show. It keeps no count of steps, so that all matrices may step a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from orchestrator.common.errors import UsageError

AT_ONCE = 256 << 20  # bytes of gradients that are whole at a time
MOMENTUM = "momentum_buffer"


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
    for some in messages(every):
        for parameter in some:
            parameter.grad = whole(gradients[parameter])
            state = optimizer.state[parameter]
            if MOMENTUM in state:
                state[MOMENTUM] = whole(state[MOMENTUM])
        optimizer.step()
        for parameter in some:
            parameter.grad = None
            state = optimizer.state[parameter]
            state[MOMENTUM] = placed_like(parameter, state[MOMENTUM])
    for parameter in every:
        parameter.grad = gradients[parameter]


def messages(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Put parameters together whose gradients may be whole at once."""
    some: list[nn.Parameter] = []
    for parameter in parameters:
        if some and sum(p.nbytes for p in some) + parameter.nbytes > AT_ONCE:
            yield some
            some = []
        some.append(parameter)
    if some:
        yield some


def whole(tensor: Any) -> Any:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def placed_like(parameter: Any, tensor: Any) -> Any:
    return (
        tensor.redistribute(placements=parameter.placements)
        if isinstance(tensor, DTensor)
        else tensor
    )
