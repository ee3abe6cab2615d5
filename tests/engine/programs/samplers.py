"""Samplers that people write; worlds.py calls these with the job's directory."""

from __future__ import annotations

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

MANY, BATCH, EPOCHS = 12, 4, 3  # samples; in a step; three steps an epoch
STEPS = (2, 4, 6)  # after which a training goes on: in its first epoch, its second, between two


class OwnGenerator(Sampler[int]):
    """Draws by a generator that goes on from epoch to epoch."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return MANY

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(MANY).tolist())


class Stateful(OwnGenerator):
    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.bit_generator.state = state["random"]


class Unseeded(OwnGenerator):
    def __init__(self) -> None:
        super().__init__(int.from_bytes(os.urandom(4), "big"))


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
    """Gives each rank other samples, as nobody but stream="own" says."""

    def __init__(self) -> None:
        super().__init__(RANK)

    def __len__(self) -> int:
        return MANY // world()

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[: len(self)])


class Learning(OwnGenerator):
    """Begins at another sample after each step, which it is told of."""

    hard = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(MANY):
            yield (index + 5 * self.hard) % MANY

    def state_dict(self) -> dict[str, Any]:
        return {"hard": self.hard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hard = state["hard"]


class Level(OwnGenerator):
    """Leaves samples out from a level on, which a hook sets at an epoch's end."""

    level = 0

    def __iter__(self) -> Iterator[int]:
        return iter([max(self.level, sample) for sample in super().__iter__()])


class Counted(IterableDataset[Tensor]):
    """A stream that counts its epochs by itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        order = np.random.default_rng(self.epoch).permutation(MANY)
        self.epoch += 1
        yield from (torch.tensor([float(sample)]) for sample in order)


def of_samples(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(MANY), BATCH // world(), sampler=sampler)


def loader(kind: str) -> DataLoader[Any]:
    data, own = Numbers(MANY), torch.Generator().manual_seed(7)
    own_classes = (
        OwnGenerator,
        Stateful,
        Unseeded,
        Another,
        Global,
        Told,
        Growing,
        Parts,
        Own,
        Learning,
        Level,
    )
    makers: dict[str, Callable[[], DataLoader[Any]]] = {
        "random": lambda: of_samples(RandomSampler(data, generator=own)),
        "replaced": lambda: of_samples(RandomSampler(data, replacement=True)),
        "weighted": lambda: of_samples(WeightedRandomSampler(torch.arange(1.0, 13.0), MANY)),
        "Buckets": lambda: DataLoader(data, batch_sampler=Buckets()),
        "batched": lambda: DataLoader(
            data, batch_sampler=BatchSampler(OwnGenerator(), BATCH // world(), drop_last=True)
        ),
        "stream": lambda: DataLoader(Counted(), BATCH // world()),
        **{each.__name__: (lambda each=each: of_samples(each())) for each in own_classes},  # type: ignore[misc]
    }
    return makers[kind]()


class Run:
    """One life of a training: what this rank has seen, and what was said."""

    def __init__(self, kind: str, directory: Path, step: int | None = None) -> None:
        self.seen: list[list[float]] = []
        self.loader, said = loader(kind), io.StringIO()
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
            stream="own" if kind == "Own" else "dealt", on_step_end=self.learn,
        )  # fmt: skip

    def step(self, model: nn.Module, batch: Tensor) -> Any:
        self.seen.append(batch.flatten().tolist())
        return model(batch).sum(), batch.numel()

    def learn(self, trainer: Trainer) -> None:
        sampler = self.loader.sampler
        if isinstance(sampler, Learning):
            sampler.hard += 1
        elif isinstance(sampler, Level) and trainer.state.step == STEPS[-1]:
            sampler.level = 5


def goes_on(kind: str, again: str, directory: Path) -> list[str]:
    """Train, and go on from three of its checkpoints; say what came of each."""
    whole = Run(kind, directory / kind)
    found = [line for line in whole.said.splitlines() if "WARNING" in line]
    for step in STEPS:
        resumed = attempt(lambda: Run(again, directory / kind, step))  # noqa: B023
        if isinstance(resumed, Run):
            same = resumed.seen == whole.seen[step:]
            said = [
                line for line in resumed.said.splitlines() if "drawn by" in line or "WARN" in line
            ]
            found.append("; ".join(["same" if same else "DIFFERS", *said]))
        else:
            found.append(resumed)
    return found


def samplers(directory: Path) -> None:
    kinds = [
        *("random", "replaced", "weighted", "OwnGenerator", "Global", "Told", "Stateful"),
        *("Growing", "Buckets", "batched", "Parts", "Own", "stream"),
        *("Learning", "Level", "Unseeded"),
    ]
    results: dict[str, Any] = {kind: goes_on(kind, kind, directory) for kind in kinds}
    results["another"] = goes_on("OwnGenerator", "Another", directory / "another")
    results["as drawn"] = Run("Learning", directory / "once").seen
    tell(directory, results)
