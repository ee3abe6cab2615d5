"""bf16 and fp16 are torch's autocast, on one rank and on many, sharded or not.

Weights stay as they are, and travel as they are: a norm or a table of angles is worth nothing in
bf16, and FSDP knows one dtype for a whole block.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def computing(low: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Compute in low precision, the same for every strategy."""
    return contextlib.nullcontext() if low == "fp32" else torch.autocast(device.type, DTYPES[low])


def policy(reduce_dtype: str, module: nn.Module) -> MixedPrecisionPolicy:
    """Choose the dtype of a module's sums: fp32 would round the gradients of fp64."""
    finer = any(parameter.dtype is torch.float64 for parameter in module.parameters())
    return MixedPrecisionPolicy(
        reduce_dtype=torch.float64 if finer and reduce_dtype == "fp32" else DTYPES[reduce_dtype],
        cast_forward_inputs=False,
    )
