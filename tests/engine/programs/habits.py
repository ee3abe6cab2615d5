"""Loaders and habits that people really have; worlds.py calls these with the job's directory."""

import os
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from orchestrator import Trainer, distributed
from tests.engine.programs.basics import (
    RANK,
    Numbers,
    attempt,
    data,
    fit,
    tell,
    world,
)

Pair = namedtuple("Pair", "x y")


def stacked(rows: Any) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def trained(
    loader: Any, step: Any, model: nn.Module | None = None, lr: float = 0.1, **more: Any
) -> float:
    torch.manual_seed(0)
    model = model or nn.Linear(6, 3)
    strategy = more.pop("strategy", "ddp")
    stream = more.pop("stream", "dealt")
    optimizer = torch.optim.SGD(model.parameters(), lr)
    trainer = Trainer(model, optimizer, step=step, strategy=strategy, stream=stream)
    history = trainer.train(loader, verbose=False, **({"epochs": 1} | more))
    return history[-1]["train_loss"]


def plain(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


# -- batches of all kinds -------------------------------------------------------------------------


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": f"sample-{index}", "x": torch.ones(6) * index, "y": index % 3}


@dataclass
class Plain:
    x: Tensor
    y: Tensor
    note: str = "no tensor"


class Graph(Plain):
    """As PyG's: it knows how to move itself, and the device only."""

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.x.to(device), self.y.to(device), "moved")


class Encoding(UserDict[str, Any]):
    """As a BatchEncoding of transformers."""

    def __init__(self, values: Any = None, kind: str = "") -> None:
        super().__init__(values)
        self.kind = kind


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 3, batch_first=True)

    def forward(self, x: PackedSequence) -> Tensor:
        assert isinstance(x, PackedSequence)
        out: Tensor = self.rnn(x)[1][0]
        return out


def batches(collate: Callable[[Any], Any], read: Callable[[Any], Any]) -> Callable[[], float]:
    """Train on batches that `collate` makes and `read` takes apart again, into (x, y)."""
    loader = DataLoader(data(), 4 // world(), collate_fn=collate)
    return lambda: trained(loader, lambda model, batch: plain(model, read(batch)))


def seen(loader: Any, **more: Any) -> list[float]:
    """Return what all ranks together see of a loader of numbers, and the mean that is shown."""
    numbers: list[float] = []

    def step(model: nn.Module, batch: Tensor) -> Any:
        numbers.extend(batch.flatten().tolist())
        out = model(batch.view(-1, 1))
        return out.sum(), out.numel(), {"sum": batch.sum()}

    model = nn.Linear(1, 1)
    stream = more.pop("stream", "dealt")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    trainer = Trainer(model, optimizer, step=step, strategy="ddp", stream=stream)
    history = trainer.train(loader, verbose=False, **({"epochs": 1} | more))
    shared = distributed.gather_tensors(torch.tensor(numbers))
    return [*sorted(torch.cat(shared).tolist()), history[-1]["train_sum"]]


class Late(Numbers):
    """The first batch of a worker comes only after the second of the other."""

    def __init__(self, event: Any) -> None:
        super().__init__(13)
        self.event = event

    def __getitem__(self, index: int) -> Tensor:
        if index < 2:
            self.event.wait()
        if 6 <= index < 8:
            self.event.set()
        return super().__getitem__(index)


class Own:
    """A sampler that knows nothing of torch's classes."""

    def __init__(self, draw: Callable[[], Iterator[Any]], length: int | None = None) -> None:
        self.draw = draw
        if length is not None:
            self.__class__ = type("OwnWithLength", (Own,), {"__len__": lambda _: length})

    def __iter__(self) -> Iterator[Any]:
        return self.draw()


class Repeats(Own):
    """As torchvision's RASampler: its part for each rank, without being a DistributedSampler."""

    def __init__(self) -> None:
        self.rank, self.num_replicas = RANK, world()
        super().__init__(lambda: iter(range(self.rank, 12, self.num_replicas)))

    def __len__(self) -> int:
        return 12 // self.num_replicas


def part() -> Own:
    return Own(lambda: iter(range(RANK, 12, world())), 12 // world())


def endless() -> Iterator[int]:
    while True:
        yield from range(12)


def images(rows: Any) -> Any:
    """A list of images, as for detection: its first tensor's first dimension is a colour."""
    return [x.expand(3, 6) for x, _ in rows], stacked(rows)[1]


class Stream(IterableDataset[Any]):
    """Samples that no sampler knows."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples[index] for index in range(len(self.samples)))


def weighted(samples: Any) -> list[float]:
    """The loss of five samples in batches of uneven size, by the Trainer and by hand."""
    loader = DataLoader(samples, 4 // world(), collate_fn=images)
    own = trained(loader, lambda m, b: cross_entropy(m(torch.stack(b[0])[:, 0]), b[1]), lr=0.0)
    torch.manual_seed(0)
    return [own, cross_entropy(nn.Linear(6, 3)(data(5)[:][0]), data(5)[:][1]).item()]


class Augmented(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1)


def augmented(directory: Path, **more: Any) -> bool:
    """Whether a resume between two epochs draws what the uninterrupted training drew."""
    loader = DataLoader(Augmented(), 3, num_workers=1, **more)
    drawn: list[float] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        drawn.extend(batch.flatten().tolist())
        out: Tensor = model(batch).mean()
        return out

    def training(epochs: int, name: str) -> None:
        model = nn.Linear(1, 1)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), step=step)
        saved = {"save_every": "1 epoch", "save_to": directory / name, "resume": True}
        trainer.train(loader, epochs=epochs, verbose=False, **saved)

    training(2, "whole")
    expected, drawn[:] = drawn[:], []
    training(1, "parts")
    training(2, "parts")
    return drawn == expected


def loaders(directory: Path) -> None:
    """Every case by its name: what it returned, or what was raised."""
    distributed.setup_distributed()
    numbers, event = Numbers(), torch.multiprocessing.get_context("fork").Event()
    each = 4 // world()
    cases: dict[str, Callable[[], Any]] = {
        "tuples": batches(stacked, lambda b: b),
        "namedtuples": batches(lambda rows: Pair(*stacked(rows)), lambda b: (b.x, b.y)),
        "dataclasses": batches(lambda rows: Plain(*stacked(rows)), lambda b: (b.x, b.y)),
        "graphs": batches(
            lambda rows: Graph(*stacked(rows)), lambda b: (b.x, b.y) if b.note == "moved" else None
        ),
        "encodings": batches(
            lambda rows: Encoding(zip("xy", stacked(rows), strict=True), "kept"),
            lambda b: (b["x"], b["y"]) if b.kind == "kept" else None,
        ),
        "sums of graphs": lambda: trained(
            DataLoader(data(), each, collate_fn=lambda rows: Graph(*stacked(rows))),
            lambda m, b: (cross_entropy(m(b.x), b.y, reduction="sum"), len(b.y)),
        ),
        "strings": lambda: trained(
            DataLoader(Named(), each), lambda m, b: cross_entropy(m(b["x"]), b["y"])
        ),
        "packed": lambda: trained(
            DataLoader(
                data(),
                each,
                collate_fn=lambda rows: (
                    pack_sequence([x.expand(1 + n, 6) for n, (x, _) in enumerate(rows)], False),
                    stacked(rows)[1],
                ),
            ),
            plain,
            Recurrent(),
        ),
        "weighted": lambda: weighted(data(5)),
        "weighted stream": lambda: weighted(Stream(data(5))),
        "batch sampler": lambda: seen(
            DataLoader(numbers, batch_sampler=BatchSampler(RandomSampler(numbers), 3, False))
        ),
        "no length": lambda: seen(
            DataLoader(numbers, batch_sampler=Own(lambda: iter([[0, 1], [2, 3, 4]])))
        ),
        "endless": lambda: len(
            seen(DataLoader(numbers, 3, sampler=Own(endless)), epochs=None, max_period="3 steps")
        ),
        "parts": lambda: seen(DataLoader(numbers, 3, sampler=Repeats())),
        "own parts": lambda: seen(DataLoader(numbers, 3, sampler=part()), stream="own"),
        "hidden parts": lambda: seen(DataLoader(numbers, 3, sampler=part())),
        "out of order": lambda: seen(DataLoader(Late(event), 2, num_workers=2, in_order=False)),
        "NaN in a stream": lambda: trained(
            [(torch.full((4, 6), torch.nan), torch.zeros(4).long())] * 4,
            lambda m, b: cross_entropy(m(b[0].nan_to_num()), b[1]),
        ),
        "named loss": lambda: trained(
            DataLoader(data(), each),
            lambda m, b: (cross_entropy(m(b[0]), b[1], reduction="sum"), 1, {"loss": b[0].sum()}),
        ),
        "persistent": lambda: augmented(directory / "persistent", persistent_workers=True),
        "generator": lambda: augmented(directory / "generator", generator=torch.Generator()),
        "other names": lambda: Trainer(
            nn.Linear(1, 1),
            torch.optim.SGD,
            step=lambda m, b: (m(b).sum(), len(b), {f"from {RANK}": b.sum()}),
        ).evaluate(DataLoader(numbers, 2)),
        "spent": lambda: trained(DataLoader(data(), each), plain, val_loader=iter([]), epochs=2),
        "spent training": lambda: trained((b for b in [1]), plain, epochs=2),
        "empty": lambda: trained(
            DataLoader(data(), each), plain, val_loader=DataLoader(data(3), 4, drop_last=True)
        ),
    }  # fmt: skip
    results = {name: attempt(case) for name, case in cases.items()}
    tell(directory, results)


# -- what else people do --------------------------------------------------------------------------


def frozen() -> list[float]:
    """How far a BatchNorm moved: one that was frozen, one in on_train_begin, one of a library."""
    moved = []
    for freeze, begin in (
        (True, None),
        (False, lambda trainer: trainer.bare[1].eval()),
        (False, None),
    ):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        if freeze:
            model[:2].requires_grad_(False).eval()
        else:
            model.eval()
        before = model[1].running_mean.clone()
        trainer = Trainer(model, torch.optim.SGD, nn.CrossEntropyLoss(), on_train_begin=begin)
        trainer.train(fit(), fit(), epochs=2, verbose=False)
        moved.append((model[1].running_mean - before).abs().max().item())
    return moved


def two_trainers() -> list[int]:
    """The lines that each of two has written in this experiment, epochs included."""
    lines = []
    for epochs in (3, 1):
        trainer = Trainer(nn.Linear(6, 3), torch.optim.SGD, nn.CrossEntropyLoss(), log_every=1)
        trainer.train(fit(), epochs=epochs, verbose=False)
    outputs = Path(os.environ["ORCHESTRATOR_EXPERIMENT"], "outputs")
    for name in (f"rank_{RANK:02d}_metrics.jsonl", f"rank_{RANK:02d}_metrics_2.jsonl"):
        lines.append(len((outputs / name).read_text().splitlines()))
    return lines


def habits(directory: Path) -> None:
    distributed.setup_distributed()
    torch.manual_seed(0)
    results = {
        "two trainers": attempt(two_trainers),
        "frozen": attempt(frozen),
    }
    tell(directory, results)
