"""Models that use random parts of themselves, for tests/engine/core/test_used_parts.py."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from orchestrator import Trainer, distributed
from orchestrator.common.errors import OrchestratorError
from tests.engine.programs.basics import whole

BATCH, ACCUMULATE, SAMPLES = 8, 3, 48


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


class Routed(nn.Module):
    def __init__(self, seed: int, *, by_row: bool) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.seed, self.by_row, self.calls = seed, by_row, 0
        self.blocks = nn.ModuleList(Expert(chance.choice((1, 2, 3))) for _ in range(3))
        self.more = nn.ModuleDict({name: nn.Linear(6, 6) for name in "ab"})
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for number, block in enumerate(self.blocks):
            chosen = self.choice(x, number, len(block.layers) + 1)
            if (chosen < len(block.layers)).any():  # else the whole block is left out
                x = block(x, chosen)
        for number, layer in enumerate(self.more.values()):
            if (used := self.choice(x, 7 + number, 2) == 0).any():
                x = x + torch.where(used[:, None], layer(x), 0.0)
        out: Tensor = self.head(x)
        return out

    def choice(self, x: Tensor, number: int, among: int) -> Tensor:
        """For each row: by what it holds at first, or the same for all of this call."""
        if self.by_row:
            return (self.rows + number) % 17 % among
        chance = random.Random(f"{self.seed} {self.calls} {number}")
        return torch.full((len(x),), chance.randrange(among))


class Keyed(Routed):
    """Takes the number of each row with it."""

    def forward(self, x: Tensor) -> Tensor:
        self.rows = x[:, 0].long()
        return super().forward(x[:, 1:])


def samples(seed: int) -> TensorDataset:
    own = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 60, (SAMPLES, 1), generator=own)
    x = torch.randn(SAMPLES, 6, generator=own)
    return TensorDataset(torch.cat([rows, x], 1), torch.randint(0, 3, (SAMPLES,), generator=own))


def trained(seed: int, strategy: str, unused: bool, by_row: bool, **fsdp: Any) -> Any:
    """The weights at the end, or why it was refused."""
    torch.manual_seed(seed)
    model = Keyed(seed, by_row=by_row)
    loader = DataLoader(samples(seed), BATCH // int(os.environ["WORLD_SIZE"]))
    try:
        trainer = Trainer(
            model,
            torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.5),
            nn.CrossEntropyLoss(),
            accumulate=ACCUMULATE,
            strategy=strategy,
            find_unused_parameters=unused,
            config={"fsdp": fsdp} if fsdp else None,
        )
        trainer.train(loader, epochs=2, verbose=False)
    except OrchestratorError as error:
        return str(error)
    return whole(model)


def cases() -> Iterator[tuple[int, bool, str, bool, dict[str, Any]]]:
    """Seed, whether ranks differ, strategy, find_unused_parameters, keys of fsdp."""
    count = int(os.environ["CASES"])
    for seed in range(count):
        yield seed, False, "ddp", False, {}
        yield seed, True, "ddp", True, {}
        yield seed, False, "ddp", True, {}
        yield seed, False, "full_shard", False, {}
        yield seed, False, "hybrid_shard", False, {"accumulate": "whole"}


def every_case(directory: Path) -> None:
    rank = distributed.setup_distributed()["rank"]
    alone = int(os.environ["WORLD_SIZE"]) == 1
    found = {}
    for seed, by_row, strategy, unused, fsdp in cases():
        key = (seed, by_row) if alone else (seed, by_row, strategy, unused, *fsdp)
        if key not in found:
            found[key] = trained(seed, strategy, unused, by_row, **fsdp)
    if rank == 0:
        torch.save(found, directory / "found")


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
