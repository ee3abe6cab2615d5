"""Models as people build them, trained by hybrid_shard and by a plain loop."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from orchestrator import Trainer, distributed
from tests.engine.programs.basics import BATCH, data, message, tell, whole, world

SHARDED = "hybrid_shard"
SAMPLES = 21
# This is below the norm of the first steps.
CLIP = 0.1


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in getattr(self, "layers", []):
            x = x + torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


class Clip(Base):
    """A scalar parameter, as CLIP's logit_scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.exp()


class Pairs(Base):
    """ModuleList([ModuleList([attention, mlp]), ...]), as vit-pytorch and many U-Nets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.layers:
            x = x + second(torch.tanh(first(x)))
        out: Tensor = self.head(x)
        return out


class Universal(Base):
    """One block used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6)] * 3)


class Tied(Base):
    """A weight in two blocks, beside a third of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight


class TiedToHead(Base):
    """A block that shares its weight with what comes after all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.last(x))


class Mixed(Base):
    """Matrices in double precision, the rest in fp32, also inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        for layer in self.layers:
            layer.line.double()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.gain, self.calls = nn.Linear(6, 6), nn.Parameter(torch.ones(6)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.line(x.to(self.line.weight.dtype)).float() * self.gain
        return out


class ChannelsLast(Base):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.conv(x.view(-1, 1, 2, 3).expand(-1, 2, -1, -1)).mean(1).flatten(1)
        return super().forward(seen)


class Transposed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.turn)


class Complex(Base):
    """Filters in the frequency domain, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.none = nn.Parameter(torch.empty(0, 6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.fft.ifft(torch.fft.fft(x) * self.filter).real)


class Stacked(Base):
    """Stages of blocks in Sequentials, as timm's and torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))


class Spare(Base):
    """A parameter with NaN, which nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.full((2,), torch.nan), requires_grad=False)


class Masked(Base):
    """Hooks that let a part of a weight stay as it is, as for the rows of some tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        for parameter in (self.layers[0].weight, self.head.bias):
            some = torch.arange(parameter.shape[-1]) % 2
            parameter.register_hook(lambda gradient, some=some: gradient * some)


def shortened() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 6, max_norm=1.0), nn.Flatten(), nn.Linear(36, 3))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.table(x[:, 0].sign().long() + 1)
        return out


# The FSDP groups besides the root's.
MODELS: dict[type[Base], int] = {
    Clip: 0, Pairs: 4, Universal: 1, Tied: 1, TiedToHead: 1, Mixed: 2, ChannelsLast: 0,
    Transposed: 0, Complex: 0, Stacked: 4, Spare: 0,
}  # fmt: skip

BETWEEN_NODES = (TiedToHead, Mixed, Complex, Stacked)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 0.02)


def of_logits(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(getattr(outputs, "logits", outputs), targets)


def by_hand(model: nn.Module) -> dict[str, Tensor]:
    """Train as one process would; two micro-batches of all ranks are a batch."""
    stepper, (x, y) = optimizer(model), data(SAMPLES)[:]
    for first in range(0, len(x), 2 * BATCH):
        of_logits(model(x[first : first + 2 * BATCH]), y[first : first + 2 * BATCH]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        stepper.step()
        stepper.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def furthest(make: Callable[[], nn.Module], directory: Path) -> list[float]:
    """How far the weights are from those of a plain loop, and from themselves once resumed; and
    the FSDP groups besides the root's."""
    torch.manual_seed(0)
    expected = by_hand(make())
    torch.manual_seed(0)
    model = make()
    fit = DataLoader(data(SAMPLES), BATCH // world())

    def training(model: nn.Module) -> Trainer:
        how = {"accumulate": 2, "clip_grad_norm": CLIP, "strategy": SHARDED}
        return Trainer(model, optimizer(model), of_logits, **how)

    trainer = training(model)
    trainer.train(fit, epochs=1, verbose=False)
    saved = trainer.save_checkpoint(directory / make.__name__)
    other = make()
    training(other).load_checkpoint(saved)
    groups = sum(isinstance(module, FSDPModule) for module in model.modules()) - 1
    return [far(whole(model), expected), far(whole(other), whole(model)), groups]


def far(own: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert own.keys() == expected.keys()
    apart = [(own[name] - value).abs() for name, value in expected.items()]
    return max(value.nan_to_num().max().item() for value in apart if value.numel())


def hybrid_shard(directory: Path) -> None:
    """Train all on two ranks, where sharding is all there is, and a few between nodes."""
    distributed.setup_distributed()
    results: dict[str, Any] = {}
    for make in MODELS if world() == 2 else BETWEEN_NODES:
        kept: list[Any] = []
        raised = message(lambda make=make, kept=kept: kept.append(furthest(make, directory)))
        results[make.__name__] = kept[0] if kept else raised
    if world() == 2:
        others(results)
    tell(directory, results)


def others(results: dict[str, Any]) -> None:
    """Models that are refused, that compute twice, and that shards cannot hold."""
    results["recomputed"] = recomputed()
    results["hook"] = message(trained, Masked(), torch.optim.SGD)
    results["shortened"] = message(trained, shortened(), torch.optim.SGD, "ddp")
    results["sparse"] = message(trained, Sparse(), torch.optim.SGD)
    results["sparse far"] = [sparse(torch.optim.SGD), sparse(torch.optim.SparseAdam)]
    results["nothing to recompute"] = message(recomputed, Clip)


def recomputed(make: type[Base] = Stacked) -> list[int]:
    """How often the forwards of the blocks ran in one step."""
    model = make()
    trainer = Trainer(
        model, optimizer(model), nn.CrossEntropyLoss(), strategy=SHARDED,
        config={"training": {"activation_checkpointing": "full"}},
    )  # fmt: skip
    trainer.train(DataLoader(data(2 * world()), 2), epochs=1, verbose=False)
    return [module.calls for module in model.modules() if isinstance(module, Block)]


def trained(model: nn.Module, make: Any, strategy: str = SHARDED) -> dict[str, Tensor]:
    trainer = Trainer(model, make, nn.CrossEntropyLoss(), strategy=strategy)
    trainer.train(DataLoader(data(SAMPLES), BATCH // world()), epochs=1, verbose=False)
    return whole(model)


def sparse(make: Any) -> float:
    """How far the weights are from those of a plain loop, where gradients are sparse."""
    torch.manual_seed(0)
    model = Sparse()
    expected = copy.deepcopy(model)
    own = trained(model, lambda parameters: make(parameters, lr=0.1), strategy="ddp")
    stepper, (x, y) = make(expected.parameters(), lr=0.1), data(SAMPLES)[:]
    for first in range(0, len(x), BATCH):
        rows = slice(first, first + BATCH)
        nn.functional.cross_entropy(expected(x[rows]), y[rows]).backward()
        stepper.step()
        stepper.zero_grad()
    return far(own, dict(expected.named_parameters()))
