"""Makes values equal on all ranks, or refuses a model of another shape on some."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.ranks.ranks import gather_values, host_group

FIX = "make the same model everywhere; torch's seed is set before a model.target is made"


def take_weights_of_first(model: nn.Module) -> None:
    """Copy rank 0's weights to all ranks, because each rank initialises its own model."""
    take_values_of_first(named_tensors(model))


def take_buffers_of_first(model: nn.Module) -> None:
    """Copy rank 0's buffers to all ranks, before the model is evaluated or saved.

    Otherwise each rank has the running statistics of its own batches.
    """
    # Buffers outside of the state dict may differ in size between ranks.
    kept = model.state_dict().keys()
    take_values_of_first([(name, value) for name, value in model.named_buffers() if name in kept])


def take_values_of_first(values: Sequence[tuple[str, Tensor]]) -> None:
    refuse_other_shapes(values)
    for _, value in values if dist.get_world_size() > 1 else ():
        first = value.data.contiguous()
        # gloo knows few dtypes: no short integers, and in torch 2.8 no complex numbers.
        sent = first.reshape(-1).view(torch.uint8)
        dist.broadcast(sent, 0, group=host_group() if first.device.type == "cpu" else None)
        value.data.copy_(first)


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def refuse_other_shapes(values: Sequence[tuple[str, Tensor]]) -> None:
    described = [(name, tuple(value.shape), str(value.dtype)) for name, value in values]
    for rank, own in enumerate(every := gather_values(described)):
        if own != every[0]:
            missing = [entry for entry in every[0] if entry not in own]
            extra = [entry for entry in own if entry not in every[0]]
            raise CheckFailed(
                f"the model is not the same on all ranks: rank {rank} lacks {missing[:1]} of rank"
                f" 0, and has {extra[:1]}",
                FIX,
            )
