from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.engine.core.optimizer import FUSED, can_fuse

CLOSE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("make", FUSED)
def test_what_is_fused_computes_the_same(make: Any, dtype: torch.dtype) -> None:
    """Kernels for processors leave some dtypes as they are, and make infinities of others."""
    found = {}
    for fused in (False, None):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(37).to(dtype))
        optimizer = make([parameter], lr=0.05, fused=fused)
        if fused is None and can_fuse(optimizer):
            optimizer.param_groups[0]["fused"] = True
        for _ in range(3):
            parameter.grad = torch.randn(37).to(dtype)
            optimizer.step()
        found[fused] = parameter.detach()
    torch.testing.assert_close(found[None], found[False], atol=CLOSE[dtype], rtol=0)


def test_a_choice_of_the_user_stays() -> None:
    weight = [nn.Parameter(torch.zeros(2))]
    assert can_fuse(torch.optim.AdamW(weight))
    assert not can_fuse(torch.optim.AdamW(weight, fused=False))
    assert not can_fuse(torch.optim.AdamW(weight, foreach=True))
