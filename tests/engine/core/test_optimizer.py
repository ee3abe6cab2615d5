from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.engine.core.optimizer import FUSED, can_fuse, unsaved

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


class Keeping(torch.optim.SGD):
    """As some libraries' optimizers: a list for a parameter, a value for all, and an attribute."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] |= {"bases": [torch.zeros(2)], "count": 1}
        self.state["k"] = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"moments": [1.0]}


def test_what_no_checkpoint_has_is_named() -> None:
    weight = nn.Parameter(torch.zeros(2))
    for make, names in ((torch.optim.AdamW, []), (Keeping, ["bases", "k", "moments"])):
        optimizer = make([weight], lr=0.1)
        weight.grad = torch.ones(2)
        optimizer.step()
        assert unsaved(optimizer) == names


def test_a_choice_of_the_user_stays() -> None:
    weight = [nn.Parameter(torch.zeros(2))]
    assert can_fuse(torch.optim.AdamW(weight))
    assert not can_fuse(torch.optim.AdamW(weight, fused=False))
    assert not can_fuse(torch.optim.AdamW(weight, foreach=True))
