"""Values that are equal on all ranks, and those that are made equal."""

from pathlib import Path

import pytest
import torch
from torch import nn

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.ranks import agreement
from tests.engine import pair

pytestmark = pytest.mark.slow


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.register_buffer("seen", torch.tensor(float("nan")))
        self.register_buffer("short", torch.tensor([3], dtype=torch.int16))


def takes_weights(rank: int, directory: Path) -> None:
    model = Model()
    with torch.no_grad():
        model.layers[2].bias[1] += rank
    agreement.take_weights_of_first(model)
    assert torch.equal(model.layers[2].bias, Model().layers[2].bias)
    assert model.seen.isnan()
    if rank:
        model.layers[1] = nn.Linear(3, 3, bias=False)
    with pytest.raises(CheckFailed, match=r"rank 1 lacks \[\('layers\.1\.bias', \(3,\)"):
        agreement.take_weights_of_first(model)


def test_all_ranks_take_weights_of_rank_0(tmp_path: Path) -> None:
    pair.run(takes_weights, tmp_path)
