"""Carry `parameter.data = value` into the shard of the parameter, as people write it in hooks.

torch changes the outside of a sharded parameter then, and leaves its shard as it was, in silence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from orchestrator.common.errors import UsageError

OF_TORCH: Any = Tensor.data


def carry_assignments() -> None:
    DTensor.data = property(OF_TORCH.__get__, assign)  # type: ignore[assignment]


@torch.no_grad()
def assign(parameter: DTensor, value: Tensor) -> None:
    """Copy a value of the same shape, whole or sharded: whoever gathers the shard has it then."""
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise UsageError(
            f"a sharded parameter of shape {tuple(parameter.shape)} ({parameter.dtype}) was given"
            f" data of shape {tuple(value.shape)} ({value.dtype})",
            "a model keeps the shapes and dtypes that it had when it was given to the Trainer",
        )
    if not isinstance(value, DTensor):
        where = parameter.device_mesh, parameter.placements
        value = distribute_tensor(value.to(parameter.device), *where, src_data_rank=None)
    parameter.copy_(value)
