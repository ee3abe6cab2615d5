"""Weights that are made of other tensors, as torchao's: frozen ones of 8 bits, and trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree
from torch.utils.data import DataLoader

from orchestrator import Trainer, distributed
from tests.engine.programs.basics import BATCH, data, message, tell, world

SAMPLES = 4 * BATCH
aten = torch.ops.aten


class Quantised(Tensor):
    """Eight bits of each number, and a scale for each row; it can do little else than multiply."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Quantised:
        return Quantised(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *rest = args
            return nn.functional.linear(x, weight.numbers * weight.scale, *rest)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        if func is aten._to_copy.default:
            return cls(args[0].numbers.clone(), args[0].scale.clone())
        raise NotImplementedError(f"{func} of a quantised tensor")


class Held(Tensor):
    """A tensor that knows how it is gathered, as weights that are sent in fewer bits do."""

    KEEPING = (
        aten.empty_like.default, aten.zeros_like.default, aten.new_zeros.default,
        aten.slice.Tensor, aten.copy_.default, aten.view.default, aten.as_strided.default,
        aten._to_copy.default, aten.split.Tensor, aten.clone.default, aten.detach.default,
    )  # fmt: skip

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Held:
        return Held(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree.tree_map_only(cls, lambda held: held.inner, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree.tree_map_only(Tensor, cls, result) if func in cls.KEEPING else result

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner,), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: Any, *, out: Tensor | None = None
    ) -> Any:
        return None if out is not None else (gathered[0], gathered)


class Adapted(nn.Linear):
    """A frozen weight of 8 bits, and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127
        numbers = (self.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(Quantised(numbers, scale), requires_grad=False)
        self.low = nn.Parameter(Held(torch.randn(6, 6) / 10))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.low)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


def made(seed: int = 0) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.02)


def by_hand() -> Tensor:
    model, optimizer = made()
    for x, y in DataLoader(data(SAMPLES), BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model(data(SAMPLES)[:][0]).detach()


def trained(strategy: str, seed: int = 0, **more: Any) -> Tensor:
    """What the model gives after an epoch, or as much of one as is asked for."""
    trainer = Trainer(*made(seed), nn.CrossEntropyLoss(), strategy=strategy)
    loader = DataLoader(data(SAMPLES), BATCH // world())
    trainer.train(loader, epochs=1, verbose=False, **more)
    given: Tensor = trainer.predict(loader)
    return given


def quantised(directory: Path) -> None:
    """How far each strategy is from a plain loop, and a resume, which begins with other weights,
    from a training that was not interrupted."""
    distributed.setup_distributed()
    expected, results = by_hand(), {}
    for strategy in ("hybrid_shard", "ddp"):
        at_once, place = trained(strategy), directory / strategy
        trained(strategy, max_period="2 steps", save_to=place)
        again = trained(strategy, seed=1, save_to=place, resume=True)
        far = [(given - other).abs().max().item() for given, other in (
            (at_once, expected), (again, at_once))]  # fmt: skip
        results[strategy] = far
    tell(directory, [results, *saved(directory)])


def saved(directory: Path) -> list[str]:
    """What a file of the weights has, and why another one cannot have it."""
    trainer = Trainer(*made(), nn.CrossEntropyLoss(), strategy="hybrid_shard")
    trainer.save(directory / "model.pt")
    weights = torch.load(directory / "model.pt", weights_only=False)
    kinds = [type(weights[f"layers.0.{name}"]).__name__ for name in ("weight", "low", "bias")]
    return [*kinds, message(trainer.save, directory / "model.safetensors")]
