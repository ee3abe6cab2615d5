"""Typical changes of a team to its own model; worlds.py passes a directory."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator import Trainer, distributed
from tests.engine.programs.basics import fit, message, tell


class Net(nn.Module):
    """A body that is frozen at first, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        for block in self.body:
            x = torch.tanh(block(x))
        return self.head(x)


def trainer_of(model: nn.Module, parts: nn.Module | None = None, **more: Any) -> Trainer:
    optimizer = torch.optim.AdamW((parts or model).parameters(), 0.1)
    more.setdefault("loss", nn.CrossEntropyLoss())
    return Trainer(model, optimizer, **more)


def half_frozen() -> Net:
    model = Net()
    model.body.requires_grad_(False)
    return model


def unfrozen(strategy: str) -> list[float]:
    """The norm of the weights after an epoch with the head and one with all, on each rank."""

    def unfreeze(trainer: Trainer) -> None:
        trainer.bare.requires_grad_()

    trainer = trainer_of(half_frozen(), strategy=strategy, on_epoch_end=unfreeze)
    trainer.train(fit(), epochs=2, verbose=False)
    local = [p for p in trainer.bare.parameters() if not hasattr(p, "to_local")]
    norms = torch.tensor([sum(float(p.detach().norm()) for p in local)])
    whole = sum(float(value.norm()) for value in trainer.state_dict().values())
    return [whole, *(float(norm) for norm in distributed.gather_tensors(norms))]


def another_group() -> None:
    def unfreeze(trainer: Trainer) -> None:
        trainer.optimizer.add_param_group({"params": list(trainer.bare.body.parameters())})

    model = half_frozen()
    trainer = trainer_of(model, model.head, on_epoch_end=unfreeze)
    trainer.train(fit(), epochs=2, verbose=False)


def stranger() -> None:
    """Train parameters of a loss, whose gradients would not be reduced over the ranks."""
    own = nn.Linear(2, 2)
    Trainer(
        Net(), lambda own_parameters: torch.optim.SGD([*own_parameters, *own.parameters()], 0.1),
        nn.CrossEntropyLoss(),
    )  # fmt: skip


def compiled(directory: Path) -> list[Any]:
    model = Net()
    for part in range(2):
        model.body[part] = torch.compile(model.body[part], backend="eager")
    trainer = trainer_of(torch.compile(model, backend="eager"))
    trainer.train(fit(), epochs=1, save_every="1 epoch", save_to=directory, verbose=False)
    trainer.save(directory / "weights.pt")
    plain = trainer_of(Net())
    plain.train(fit(), epochs=1, save_to=directory, resume=True, verbose=False)
    names = sorted(torch.load(directory / "weights.pt"))
    return [names == sorted(Net().state_dict()), plain.state.step]


def counted() -> int:
    trainer = trainer_of(Net())
    trainer.train(fit(), epochs=3, verbose=False)
    return trainer.state.tokens


def first_week(directory: Path) -> None:
    distributed.setup_distributed()
    results = {
        "unfrozen": [unfrozen(strategy) for strategy in ("ddp", "hybrid_shard")],
        "another group": message(another_group),
        "stranger": message(stranger),
        "compiled": compiled(directory / "compiled"),
        "counted": counted(),
    }
    tell(directory, results)
