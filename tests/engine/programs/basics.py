"""The small model, data and steps that most programs share, and how a program answers its test."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from orchestrator import Trainer, distributed

RANK = int(os.environ.get("RANK", "0"))
# This is the global batch.
BATCH = 8
# The last batch of all ranks has one sample.
SAMPLES = 41
EPOCHS = 2
# The last step of an epoch has micro-batches of eight and of one.
ACCUMULATE = 2
CLIP = 0.2
MORE = ("hybrid_shard", "full_shard", "shard_grad_op", "ddp")


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.head(self.dropout(x))
        return out


def net(dropout: float = 0.0, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(dropout)


def samples(size: int = SAMPLES) -> TensorDataset:
    own = torch.Generator().manual_seed(5)
    targets = torch.randint(0, 3, (size,), generator=own)
    # These targets are ignored, so a batch has fewer than its size.
    targets[::5] = -100
    return TensorDataset(torch.randn(size, 6, generator=own), targets)


class Numbers(Dataset[Tensor]):
    """Samples that are their own numbers."""

    def __init__(self, size: int = 12) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.02},
        ],
        lr=0.05,
    )


def warmed(model: nn.Module) -> torch.optim.Optimizer:
    made = optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    made.step()
    made.zero_grad()
    return made


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


def loader(size: int = SAMPLES, **more: Any) -> DataLoader[Any]:
    return DataLoader(samples(size), **{"batch_size": BATCH // world(), **more})


def correct(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    kept = targets >= 0
    return ((outputs.argmax(-1) == targets) & kept).sum().float(), kept.sum()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.named_parameters()
    }


def shards(model: nn.Module) -> list[Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]


def trainer(**more: Any) -> Trainer:
    model = net()
    return Trainer(model, optimizer(model), nn.CrossEntropyLoss(), **more)


def data(size: int = 8) -> TensorDataset:
    """Return samples that all count towards the loss."""
    own = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 3, (size,), generator=own)
    return TensorDataset(torch.randn(size, 6, generator=own), targets)


def fit(samples: Any = None) -> DataLoader[Any]:
    """Deal out four samples at a time over all ranks."""
    return DataLoader(samples or data(), 4 // world())


# -- what a program tells its test ----------------------------------------------------------------


def message(call: Any, *args: Any, **more: Any) -> str:
    try:
        call(*args, **more)
    except Exception as error:  # noqa: BLE001 (its words are the test)
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def attempt(case: Callable[[], Any]) -> Any:
    """Return what a case returns, or the words of what it raises."""
    kept: list[Any] = []
    raised = message(lambda: kept.append(case()))
    return kept[0] if kept else raised


def tell(directory: Path, results: Any) -> None:
    """Write this rank's results, once no rank needs the others: one may hold their store."""
    distributed.barrier()
    # The first barrier may have met through the store.
    distributed.barrier()
    (directory / f"results_{RANK}").write_text(json.dumps(results))
