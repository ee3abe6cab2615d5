"""One small training, as a loop by hand and as a Trainer's: what an optimizer does is compared."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from orchestrator import Trainer
from tests.engine import pair

STEPS, BATCH = 6, 8
NONE, FIRST, LATER = slice(0), slice(BATCH), slice(2 * BATCH, 3 * BATCH)  # samples
Make = Callable[[Any], Optimizer]


def net(*, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    layers[2].requires_grad_(not frozen)
    return nn.Sequential(*layers)


def data(poisoned: slice = NONE) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, 6, generator=draw)
    y = torch.sin(x @ torch.randn(6, 4, generator=draw))
    x[poisoned] = float("nan")
    return TensorDataset(x, y)


def litter() -> None:
    """Leave in freed memory what any program leaves there."""
    for shape in ((8, 6), (8, 8), (4, 8), (8,), (4,)):
        _ = [torch.full(shape, 1e3) for _ in range(50)]


def by_hand(
    make: Make,
    after: Callable[[nn.Module, int], None] | None = None,
    poisoned: slice = NONE,
) -> dict[str, Tensor]:
    model = net(frozen=after is thaw)
    torch.manual_seed(0)
    optimizer = make(model.parameters())
    switch(optimizer, "train")
    for number, (x, y) in enumerate(DataLoader(data(poisoned), BATCH), 1):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        if loss.isfinite():
            optimizer.step()
        if after is not None:
            after(model, number)
    switch(optimizer, "eval")
    return dict(model.state_dict())


def switch(optimizer: Optimizer, mode: str) -> None:
    """Call the optimizer's train() or eval() if it has one."""
    getattr(optimizer, mode, lambda: None)()


def made(make: Make, *, frozen: bool = False, later: bool = False, **more: Any) -> Trainer:
    """Return a Trainer; with `later`, it creates the optimizer itself after sharding the model."""
    model = net(frozen=frozen)
    optimizer = make if later else make(model.parameters())
    return Trainer(model, optimizer, **{"loss": functional.mse_loss, **more})


def whole(trainer: Trainer) -> dict[str, Tensor]:
    return {
        name: (w.full_tensor() if hasattr(w, "full_tensor") else w).detach()
        for name, w in trainer.bare.named_parameters()
    }


def trained(trainer: Trainer, poisoned: slice = NONE, **more: Any) -> dict[str, Tensor]:
    batch = BATCH // (trainer.ranks.world * trainer.parts.config.training.gradient_accumulation)
    trainer.train(DataLoader(data(poisoned), batch), epochs=1, verbose=False, **more)
    return whole(trainer)


def far(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-2)


def clip(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        nn.utils.clip_grad_value_(group["params"], 1e-3)


def clip_norm(optimizer: Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.05)


def clipping(make: Make, how: Callable[..., None] = clip) -> Make:
    def hooked(parameters: Any) -> Optimizer:
        optimizer = make(parameters)
        optimizer.register_step_pre_hook(how)
        return optimizer

    return hooked


def falling(make: Make) -> Make:
    """An optimizer whose learning rate rises over three steps, and falls by a fifth in each."""
    counted = itertools.count()

    def change(optimizer: Optimizer, *_: Any) -> None:
        done = next(counted)
        for group in optimizer.param_groups:
            first = group.setdefault("first", group["lr"])
            group["lr"] = first * 0.8**done * min(1.0, (done + 1) / 3)

    return clipping(make, change)


def thaw(model: nn.Module, step: int) -> None:
    """Train the second layer from the third step on."""
    model.get_submodule("2").requires_grad_(step >= 2)


def going_on(make: Make, place: Path, **more: Any) -> float:
    """Train half, and the rest from a checkpoint; compare with all at once, to the bit."""
    at_once = trained(made(make, **more))
    saved = {"save_to": place, "save_every": "4 steps"}
    trained(made(make, **more), max_period="4 steps", **saved)
    return far(trained(made(make, **more), resume=True, **saved), at_once)


def moving(directory: Path) -> dict[str, Any]:
    """Arguments of a training that goes on from what others have saved, and saves for the next."""
    return {"save_to": directory / "moved", "save_every": "2 steps", "resume": True}


def moved_to_two_ranks_and_back(
    make: Make, train: Callable[[int, Path], None], directory: Path
) -> None:
    """Train on one process, on two ranks by a function that trains `moving`, and on one again."""
    trained(made(make), max_period="2 steps", **{**moving(directory), "resume": False})
    said = pair.run(train, directory)
    assert said.count("equal") == 2, said
    assert far(trained(made(make), **moving(directory)), by_hand(make)) < 1e-6
