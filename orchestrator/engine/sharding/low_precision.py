"""bf16 and fp16 are torch's autocast, on one rank and on many, sharded or not.

Weights stay as they are. They also travel as they are, unless fsdp.param_dtype says otherwise:
FSDP knows one dtype for a whole block, and would round its norms as well.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from orchestrator.config.schema import Fsdp

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def computing(low: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Compute in low precision, the same for every strategy."""
    return contextlib.nullcontext() if low == "fp32" else torch.autocast(device.type, DTYPES[low])


def policy(fsdp: Fsdp, module: nn.Module) -> MixedPrecisionPolicy:
    """Choose the dtypes of what a module gathers and sums; those of fp64 are never rounded."""
    finer = any(parameter.dtype is torch.float64 for parameter in module.parameters())
    gathers = fsdp.param_dtype == "bf16" and not finer
    reduce_dtype = fsdp.reduce_dtype
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if gathers else None,
        reduce_dtype=torch.float64 if finer and reduce_dtype == "fp32" else DTYPES[reduce_dtype],
        cast_forward_inputs=False,
    )
