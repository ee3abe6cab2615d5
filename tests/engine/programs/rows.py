"""Batches whose rows are not the samples that were drawn, and models that only hold others."""

import copy
import io
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, default_collate

from orchestrator import Trainer
from tests.engine.programs.basics import attempt, tell, whole, world

# BATCH samples make a micro-batch of all ranks; the last step has fewer.
BATCH, ACCUMULATE, MANY = 8, 2, 47


class Broken(Dataset[Any]):
    """Marks each third sample as broken, which a collate is to leave out."""

    def __init__(self, broken: bool = True) -> None:
        own = torch.Generator().manual_seed(3)
        self.x, self.y = torch.randn(MANY, 6, generator=own), torch.randn(MANY, 3, generator=own)
        self.broken = broken

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> Any:
        return None if self.broken and index % 3 == 1 else (self.x[index], self.y[index])


def without_none(rows: Any) -> Any:
    return default_collate([row for row in rows if row is not None])


def without_small(rows: Any) -> Any:
    kept = [row for row in rows if row[0][0] > -1.0]
    return default_collate(kept or rows[:1])


def uneven(rows: Any) -> Any:
    """Gives one row for some samples, and three for others."""
    return default_collate([row for row in rows for _ in range(1 + 2 * (row[0][0] > 0))])


def twice(rows: Any) -> Any:
    """Gives two views of each sample, which have as many columns as a batch may have samples."""
    x, y = default_collate([*rows, *rows])
    return x[:, :3], y


COLLATES: dict[str, tuple[Dataset[Any], Callable[[Any], Any], int]] = {
    "without None": (Broken(), without_none, 6),
    "without small ones": (Broken(False), without_small, 6),
    "uneven": (Broken(False), uneven, 6),
    "twice": (Broken(False), twice, 3),
}


def model_of(inputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, 3))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


def by_hand(model: nn.Module, data: Any, collate: Any, loss: Any = loss_of) -> dict[str, Tensor]:
    """Train an epoch in a plain loop on one process, whose batch is that of a step."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for batch in DataLoader(data, BATCH * ACCUMULATE, collate_fn=collate):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return whole(model)


def trained(model: nn.Module, data: Any, collate: Any, step: Any, strategy: str) -> Any:
    trainer = Trainer(
        model, torch.optim.AdamW(model.parameters(), 0.05), step=step, strategy=strategy,
        accumulate=ACCUMULATE,
    )  # fmt: skip
    loader = DataLoader(data, BATCH // world(), collate_fn=collate)
    trainer.train(loader, epochs=1, verbose=False)
    return whole(trainer.bare)


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys(), (one.keys(), other.keys())
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# -- models that only hold others -----------------------------------------------------------------


def student_and_teacher() -> nn.ModuleDict:
    parts = nn.ModuleDict({"student": model_of(6), "teacher": model_of(6)})
    parts["teacher"].requires_grad_(False)
    return parts


def taught(model: Any, batch: Any) -> Tensor:
    guessed = model["student"](batch[0])
    with torch.no_grad():
        shown = model["teacher"](batch[0] * 2)
    return mse_loss(guessed, batch[1]) + mse_loss(guessed, shown)


def stacked(model: Any, batch: Any) -> Tensor:
    x = batch[0]
    for layer in model:
        x = x + torch.tanh(layer(x))
    return mse_loss(x[:, :3], batch[1])


CONTAINERS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "ModuleDict": (student_and_teacher, taught),
    "ModuleList": (lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), stacked),
}


def containers(directory: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    data, strategies = Broken(False), ("ddp", "full_shard") if world() > 1 else ("none",)
    for name, (make, loss) in CONTAINERS.items():
        torch.manual_seed(1)
        first = make()
        expected = by_hand(copy.deepcopy(first), data, None, loss)
        for strategy in strategies:
            results[f"{name} {strategy}"] = attempt(
                lambda: apart(expected, trained(copy.deepcopy(first), data, None, loss, strategy))  # noqa: B023
            )
    return results


def rows(directory: Path) -> None:
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()):
        for name, (data, collate, inputs) in COLLATES.items():
            expected = by_hand(model_of(inputs), data, collate)
            results[name] = attempt(
                lambda: apart(expected, trained(model_of(inputs), data, collate, loss_of, "ddp"))  # noqa: B023
            )
        results |= containers(directory)
    tell(directory, results)
