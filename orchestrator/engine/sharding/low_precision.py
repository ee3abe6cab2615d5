"""bf16 and fp16 are torch's autocast, on one rank and on many, sharded or not.

Under sharding it is only a matter of what travels: a weight that autocast would round before every
use (of a linear layer, a convolution) is gathered as bf16 already, which halves traffic and memory,
and changes no number. All others (norms, embeddings, parameters of a module's own) are gathered as
they are, and so inputs are: a time of day or an angle is worth nothing in bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from orchestrator.engine.sharding.used_parts import groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Autocast rounds all parameters of these. (`in_proj_weight` is MultiheadAttention's own.)
ROUNDED = (
    *(nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def policy(low: str, reduce_dtype: str, module: nn.Module) -> MixedPrecisionPolicy:
    """Choose what travels for a module: sums in fp32 would round the gradients of fp64."""
    finer = any(parameter.dtype is torch.float64 for parameter in module.parameters())
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[low] if low != "fp32" else None,
        reduce_dtype=torch.float64 if finer and reduce_dtype == "fp32" else DTYPES[reduce_dtype],
        cast_forward_inputs=False,
    )


def gather_others_as_they_are(model: nn.Module) -> None:
    """Let FSDP round nothing but what autocast would round; it knows one dtype for a block."""
    for group in groups(model):
        group._init_mp_dtypes = functools.partial(choose, group, group._init_mp_dtypes)


def choose(group: Any, init_dtypes: Callable[[], None]) -> None:
    init_dtypes()
    if group._reduce_dtype is None:  # all of it is frozen, and may be unfrozen later
        dtypes = {(p.orig_dtype, p.reduce_dtype) for p in group.fsdp_params}
        if len(dtypes) == 1:
            ((group._orig_dtype, group._reduce_dtype),) = dtypes  # the first until torch 2.14
    for parameter in group.fsdp_params:
        info = parameter._module_info
        users = (info.module, *info.shared_modules)
        if not all(isinstance(module, ROUNDED) for module in users):
            parameter.param_dtype = None


def equal_gradients(group: Any) -> None:
    """Bring a block's gradients to one dtype: FSDP sums them as one tensor.

    From torch 2.15 on, where each parameter has a policy of its own, it does so itself.
    """
    if not hasattr(group, "mp_policy"):
        return
    wholes = [(p, getattr(p, "_unsharded_param", None)) for p in group.fsdp_params]
    kept = [
        (parameter, whole) for parameter, whole in wholes
        if whole is not None and (whole.grad is not None or has_sum(parameter))
    ]  # fmt: skip
    dtypes = {dtype for parameter, whole in kept for dtype in dtypes_of(parameter, whole)}
    if len(dtypes) < 2:
        return
    wanted = group.mp_policy.reduce_dtype or torch.float32
    for parameter, whole in kept:
        if whole.grad is not None:
            gradient = whole.grad.to(wanted)
            before = parameter.unsharded_accumulated_grad
            parameter.unsharded_accumulated_grad = gradient if before is None else before + gradient
            whole.grad = None


def has_sum(parameter: Any) -> bool:
    return parameter.unsharded_accumulated_grad is not None


def dtypes_of(parameter: Any, whole: Tensor) -> list[torch.dtype]:
    dtypes = [whole.grad.dtype] if whole.grad is not None else []
    return dtypes + ([parameter.unsharded_accumulated_grad.dtype] if has_sum(parameter) else [])
