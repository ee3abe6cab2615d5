"""Samplers and streams that people write; worlds.py calls these with the job's directory."""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from orchestrator import Trainer
from tests.engine.programs.basics import RANK, Numbers, attempt, tell, world

# Samples, and those of a step of all ranks: three steps an epoch.
MANY, BATCH, EPOCHS = 12, 4, 3
# A training goes on after these: within an epoch that is not its first, and between two.
STEPS = (4, 6)


class OwnGenerator(Sampler[int]):
    """Draws by a generator that goes on from epoch to epoch."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return MANY

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(MANY).tolist())


class Another(OwnGenerator):
    pass


class Global(OwnGenerator):
    """Draws each sample by the global random numbers of torch and numpy."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(MANY):
            yield int(torch.randint(MANY, ()) + np.random.randint(MANY)) % MANY


class Told(OwnGenerator):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(MANY).tolist())


class Growing(OwnGenerator):
    """Draws more in each epoch."""

    length = BATCH

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        drawn = self.random.permutation(self.length).tolist()
        self.length += BATCH
        return iter(drawn)


class Buckets(OwnGenerator):
    """Gives batches of neighbours, of several lengths, in an order of its own."""

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        cut = [[0, 1], [2, 3, 4], [5], [6, 7], [8, 9, 10], [11]]
        return iter([cut[place] for place in self.random.permutation(len(cut))])

    def __len__(self) -> int:
        return 6


class Parts(OwnGenerator):
    """Gives each rank its part, and is told nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.num_replicas = RANK, world()

    def __len__(self) -> int:
        return MANY // world()

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[self.rank :: self.num_replicas])


class Own(OwnGenerator):
    """Gives each rank other samples, as only stream="own" says."""

    def __init__(self) -> None:
        super().__init__(RANK)

    def __len__(self) -> int:
        return MANY // world()

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[: len(self)])


class Stateful(OwnGenerator):
    """Has a state: its place, and a seed that each epoch and each step changes."""

    at = hard = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < MANY:
            self.at += 1
            yield (5 * self.at + self.hard) % MANY
        self.at, self.hard = 0, self.hard + 7

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "hard": self.hard, "as tensor": torch.tensor([self.hard])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["as tensor"].tolist() == [state["hard"]]
        self.at, self.hard = state["at"], state["hard"]


class StatefulParts(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.rank, self.num_replicas, self.at = RANK, world(), 0

    def __len__(self) -> int:
        return MANY // world()

    def __iter__(self) -> Iterator[int]:
        return iter(sample for sample in super().__iter__() if sample % world() == RANK)


class Flow(IterableDataset[Tensor]):
    """A stream whose order depends on the epoch that it is told."""

    epoch = -1

    def __init__(self, each: bool = False) -> None:
        self.each = each

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        drawn: list[int] = np.random.default_rng(self.epoch).permutation(MANY).tolist()
        return drawn[RANK :: world()] if self.each else drawn

    def __iter__(self) -> Iterator[Tensor]:
        worker = torch.utils.data.get_worker_info()
        mine = self.order()[worker.id :: worker.num_workers] if worker else self.order()
        yield from (torch.tensor([float(sample)]) for sample in mine)


class StatefulFlow(Flow):
    """A stream that counts what it gave: nothing is read twice after a resume."""

    at = read = 0

    def __iter__(self) -> Iterator[Tensor]:
        order = self.order()
        while self.at < len(order):
            self.at, self.read = self.at + 1, self.read + 1
            yield torch.tensor([float(order[self.at - 1])])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Batches:
    """No DataLoader, but an iterable of batches that has a state."""

    def __init__(self) -> None:
        self.at = self.begun = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < MANY:
            self.at += BATCH // world()
            yield torch.arange(self.at).flip(0)[: BATCH // world()].float()[:, None]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Subclassed(DataLoader[Any]):
    pass


SAMPLERS = (OwnGenerator, Another, Global, Told, Growing, Parts, Own, Stateful, StatefulParts)


def loader(kind: str, workers: int) -> Any:
    data, own = Numbers(MANY), torch.Generator().manual_seed(7)
    size = BATCH // world()

    def made(data: Any, *size: Any, **more: Any) -> DataLoader[Any]:
        return DataLoader(data, *size, num_workers=workers, **more)

    makers: dict[str, Callable[[], Any]] = {
        "random": lambda: made(data, size, sampler=RandomSampler(data, generator=own)),
        "replaced": lambda: made(data, size, sampler=RandomSampler(data, replacement=True)),
        "weighted": lambda: made(
            data,
            size,
            sampler=WeightedRandomSampler(torch.arange(1.0, 13.0), MANY, generator=own),
        ),
        "Buckets": lambda: made(data, batch_sampler=Buckets()),
        "batched": lambda: made(
            data, batch_sampler=BatchSampler(OwnGenerator(), size, drop_last=True)
        ),
        "subclass": lambda: Subclassed(data, size, shuffle=True, num_workers=workers),
        "Flow": lambda: made(Flow(), size),
        "own Flow": lambda: made(Flow(each=True), size),
        "StatefulFlow": lambda: made(StatefulFlow(), size),
        "own StatefulFlow": lambda: made(StatefulFlow(each=True), size),
        "Batches": Batches,
    }
    if kind not in makers:
        (sampler,) = (each for each in SAMPLERS if each.__name__ == kind)
        return made(data, size, sampler=sampler())
    return makers[kind]()


class Life:
    """One life of a training: what this rank has seen, and what was said."""

    def __init__(self, kind: str, workers: int, directory: Path, step: int | None = None) -> None:
        self.seen: list[list[float]] = []
        self.loader, said = loader(kind, workers), io.StringIO()
        every: dict[str, Any] = {"save_to": directory, "save_every": "2 steps", "keep": 99}
        try:
            with contextlib.redirect_stdout(said):
                trainer = self.trainer(kind)
                if step is not None:
                    trainer.load_checkpoint(directory / f"step_{step:08d}")
                trainer.train(self.loader, epochs=EPOCHS, **(every if step is None else {}))
        finally:
            self.said = said.getvalue()

    def trainer(self, kind: str) -> Trainer:
        model = nn.Linear(1, 1)
        return Trainer(
            model, torch.optim.SGD(model.parameters(), 0.01), step=self.step, strategy="ddp",
            stream="own" if kind.lower().startswith("own") and kind != "OwnGenerator" else "dealt",
            on_step_end=self.learn,
        )  # fmt: skip

    def step(self, model: nn.Module, batch: Tensor) -> Any:
        self.seen.append(batch.flatten().tolist())
        return model(batch).sum(), batch.numel()

    def learn(self, trainer: Trainer) -> None:
        sampler = getattr(self.loader, "sampler", None)
        if type(sampler) is Stateful and not self.loader.num_workers:
            sampler.hard += 1


SAME = (
    *("random", "replaced", "weighted", "OwnGenerator", "Global", "Told", "Growing", "Buckets"),
    *("batched", "Parts", "Own", "Stateful", "StatefulParts", "Flow", "own Flow", "subclass"),
    *("StatefulFlow", "own StatefulFlow"),
)
# Of each way to say what comes next one, for a rank that is alone and has workers.
FEW = ("random", "OwnGenerator", "Global", "Buckets", "Stateful", "Flow")


def again(kind: str, other: str, workers: int, directory: Path) -> list[str]:
    """Train, and go on from some of its checkpoints; say what came of each."""
    whole = Life(kind, workers, directory)
    found = []
    for step in STEPS:
        resumed = attempt(lambda: Life(other, workers, directory, step))  # noqa: B023
        if isinstance(resumed, Life):
            found.append("same" if resumed.seen == whole.seen[step:] else "DIFFERS")
        else:
            found.append(resumed)
    return found


def samplers(directory: Path) -> None:
    """Resume on the same ranks."""
    workers = int(os.environ["WORKERS"])
    kinds = os.environ["KINDS"].split(",")
    results: dict[str, Any] = {kind: again(kind, kind, workers, directory / kind) for kind in kinds}
    results["another"] = again("OwnGenerator", "Another", workers, directory / "another")
    results["as drawn"] = Life("Stateful", workers, directory / "once").seen
    if "StatefulFlow" in kinds:
        resumed = Life("StatefulFlow", workers, directory / "StatefulFlow", STEPS[0])
        results["read"] = resumed.loader.dataset.read
    tell(directory, results)


# What goes on within an epoch on another number of ranks, and what does not.
ELSEWHERE = ("random", "Stateful", "StatefulFlow", "Batches")
NOT_ELSEWHERE = ("OwnGenerator", "Flow", "Parts", "StatefulParts", "own StatefulFlow")


def elsewhere(directory: Path) -> None:
    """Save on some ranks, or resume on others within an epoch and between two."""
    steps = STEPS if "RESUMED" in os.environ else (None,)

    def seen(kind: str, step: int | None) -> Any:
        return Life(kind, 0, directory / kind, step).seen

    kinds = (*ELSEWHERE, *NOT_ELSEWHERE)
    tell(directory, [{k: attempt(lambda: seen(k, n)) for k in kinds} for n in steps])  # noqa: B023
