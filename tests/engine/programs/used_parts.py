"""Models whose ranks use other parts of them, for tests/engine/core/test_used_parts.py."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from orchestrator import Trainer, distributed
from orchestrator.common.errors import OrchestratorError
from tests.engine.programs.basics import whole


class Expert(nn.Module):
    """One of several layers, by the row or by the call; or none of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if (mine := chosen == index).any():
                x = x + torch.where(mine[:, None], torch.tanh(layer(x)), 0.0)
        return x


def ranks_differ(directory: Path) -> None:
    """Not announced: every rank refuses, and has the weights that it began with."""
    rank = distributed.setup_distributed()["rank"]
    torch.manual_seed(0)
    model = Other()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
    try:
        trainer = Trainer(
            model, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss(),
            strategy=os.environ["STRATEGY"], find_unused_parameters="UNUSED" in os.environ,
        )  # fmt: skip
        trainer.train(DataLoader(TensorDataset(x, y), 4), epochs=1)
    except OrchestratorError as error:
        after = whole(model)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        (directory / f"refused_{rank}").write_text(str(error))


class Other(nn.Module):
    """Uses another block, or another expert of a block, on each rank."""

    def __init__(self) -> None:
        super().__init__()
        inside = os.environ["INSIDE"] == "1"
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(6, 6) for _ in range(2)) if inside else nn.Linear(6, 6)
            for _ in range(2)
        )
        if inside:
            self.blocks = nn.ModuleList(Expert(2) for _ in range(2))
        self.inside, self.head = inside, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        rank = int(os.environ["RANK"]) % 2
        if self.inside:
            for block in self.blocks:
                x = block(x, torch.full((len(x),), rank))
        else:
            x = self.blocks[rank](x)
        out: Tensor = self.head(x)
        return out
