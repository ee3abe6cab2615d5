"""A GAN, with blocks that are sharded one by one, as a loop by hand and as a Trainer's."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from orchestrator import Trainer

STEPS, BATCH = 6, 8
CLIP = {"G": 0.1, "D": 0.3}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Some of it is in blocks, and some is not."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 8), nn.Linear(8, outputs)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.features(x))
        return out


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"G": Net(4, 6), "D": Net(6, 1)}


def optimizers(of: Mapping[str, nn.Module]) -> dict[str, Any]:
    return {
        "D": SGD(of["D"].parameters(), lr=0.05, momentum=0.9),
        "G": Adam(of["G"].parameters(), lr=1e-2),
    }


def schedule(optimizer: Any) -> Any:
    return StepLR(optimizer, 3, 0.5)


def step(models: Any, batch: Any) -> dict[str, Tensor]:
    real, noise = batch
    generator, discriminator = models["G"], models["D"]
    fake = generator(noise)
    told_apart = functional.softplus(-discriminator(real)).mean()
    told_apart = told_apart + functional.softplus(discriminator(fake.detach())).mean()
    # A method beside forward is used: the generator has to match the mean of real features.
    away = discriminator.features(fake).mean(1) - discriminator.features(real).mean(1).detach()
    fooled = functional.softplus(-discriminator(fake)).mean() + away.square().mean()
    return {"G": fooled, "D": told_apart}


def poisoned(models: Any, batch: Any) -> dict[str, Tensor]:
    """Return losses of which the generator's is NaN or infinite in its first step."""
    losses = step(models, batch)
    real, _ = batch
    # The first sample of all has this value alone.
    return {**losses, "G": losses["G"] / (real[:, 0] != FIRST).all()}


FIRST = 7.0


def data(*, marked: bool = False) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    real, noise = (torch.randn(STEPS * BATCH, width, generator=draw) for width in (6, 4))
    real[:BATCH, 0] = FIRST if marked else real[:BATCH, 0]
    return TensorDataset(real, noise)


def lazily(models: Any, batch: Any) -> dict[str, Any]:
    """Compute the generator's loss when it is asked for, with a metric that is not there before."""
    asked: list[int] = vars(lazily).setdefault("asked", [])

    def fooled() -> Any:
        asked.append(1)
        return step(models, batch)["G"] * len(batch[0]), len(batch[0]), {"fooled": 1.0}

    return {"D": step(models, batch)["D"], "G": fooled}


def by_hand(call: Any = step, *, marked: bool = False, every: int = 1) -> dict[str, Tensor]:
    """Train in a plain loop, each optimizer on its own loss, the generator's every few steps."""
    of = models()
    made = optimizers(of)
    rates = {name: schedule(optimizer) for name, optimizer in made.items()}
    for number, batch in enumerate(DataLoader(data(marked=marked), BATCH), 1):
        losses = call(of, batch)
        due = [name for name in made if name == "D" or number % every == 0]
        for name in due:
            losses[name].backward(inputs=list(of[name].parameters()), retain_graph=True)
        for name in due:
            optimizer = made[name]
            nn.utils.clip_grad_norm_(of[name].parameters(), CLIP[name])
            if losses[name].isfinite():
                optimizer.step()
            optimizer.zero_grad()
            rates[name].step()
    return {f"{name}.{key}": v for name in of for key, v in of[name].state_dict().items()}


def made(call: Any = step, **more: Any) -> Trainer:
    of = models()
    given = {"optimizers": optimizers(of), "schedulers": dict.fromkeys(of, schedule), **more}
    return Trainer(models=of, step=call, clip_grad_norm=CLIP, **given)


def trained(
    trainer: Trainer, *, marked: bool = False, verbose: bool = False, **more: Any
) -> dict[str, Tensor]:
    batch = BATCH // (trainer.ranks.world * trainer.parts.config.training.gradient_accumulation)
    trainer.train(DataLoader(data(marked=marked), batch), epochs=1, verbose=verbose, **more)
    return {
        name: (w.full_tensor() if hasattr(w, "full_tensor") else w).detach().clone()
        for name, w in trainer.bare.named_parameters()
    }
