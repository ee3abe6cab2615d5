"""Batches: this rank's share of the samples, in the order of all ranks.

1. sources() gives the samples by their index; 2. Order says which index is at which position;
3. batches() deals the positions out to the ranks; 4. worker processes load ahead, if asked to.
The state of all this is one number, the position.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from orchestrator.config.schema import Config
from orchestrator.engine.data.batch import Batches, Micro, Shield, begin
from orchestrator.engine.data.sample_order import Order
from orchestrator.engine.data.sources import Source
from orchestrator.engine.models.nested import mapped
from orchestrator.engine.ranks.ranks import Ranks


class ConfiguredSamples(Batches):
    """The config's samples as the loop's batches."""

    def __init__(self, source: Source, config: Config, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.source, self.config = source, config
        self.batch_size, self.samples = config.training.batch_size, len(source)
        self.description = f"{self.samples:,} samples"


class TrainingSamples(ConfiguredSamples):
    """Those to train on: without end, epoch after epoch."""

    endless = True

    def __init__(self, source: Source, config: Config, ranks: Ranks) -> None:
        super().__init__(source, config, ranks)
        self.order = Order(len(source), config.training.seed, shuffle=config.dataset.shuffle)
        training = config.training
        self.description += (
            f": {training.max_steps} steps of {ranks.world} ranks x"
            f" {training.gradient_accumulation} micro-batches x {self.batch_size}"
        )

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        """Give this rank's batches from a position in the order of all ranks on."""
        size = self.config.training.batch_size
        first = position + self.ranks.rank * size
        places = (Place(at, size) for at in itertools.count(first, self.round_size))
        return loaded(Samples(self.source, self.order), places, self.config)


class HeldOutSamples(ConfiguredSamples):
    """Those for evaluations: every sample once over all ranks.

    All ranks get the same number of batches, or one would wait for the others in a collective: a
    rank for which no samples are left gets a batch of one that counts as none.
    """

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        size, whole, ranks = self.config.training.batch_size, len(self.source), self.ranks
        rounds = -(-whole // self.round_size)
        if self.config.training.eval_batches is not None:
            rounds = min(rounds, self.config.training.eval_batches)
        firsts = [(index * ranks.world + ranks.rank) * size for index in range(rounds)]
        own = [Place(first, min(size, whole - first)) for first in firsts]
        places = [place if place.size > 0 else Place(0, 1) for place in own]
        drawn = loaded(Samples(self.source, Order(whole, 0, shuffle=False)), places, self.config)
        for batch, place in zip(drawn, own, strict=True):
            yield batch._replace(real=place.size > 0)


# -- loading ----------------------------------------------------------------------------------


class Place(NamedTuple):
    first: int
    size: int


@dataclass(frozen=True)
class Samples(Dataset[Micro]):
    """The dataset of a worker, which can make the batch at any position."""

    source: Source
    order: Order

    def __getitem__(self, place: Place) -> Micro:
        ids = self.order.indices(*place)
        return Micro(self.source.batch(ids, place.first), ids)


def loaded(samples: Samples, places: Iterable[Place], config: Config) -> Iterator[Micro]:
    wanted = config.dataloader
    pinned = wanted.pin_memory and torch.cuda.is_available()
    if not wanted.num_workers:
        for place in places:
            batch = samples[place]
            yield batch._replace(data=mapped(batch.data, Tensor.pin_memory)) if pinned else batch
        return
    loader = DataLoader(
        samples,
        batch_size=None,  # a place is a whole batch
        sampler=Places(places),
        num_workers=wanted.num_workers,
        prefetch_factor=wanted.prefetch_factor,
        pin_memory=pinned,
        worker_init_fn=Shield(),
        generator=torch.Generator(),  # else it would draw from the one that the model uses
    )
    yield from begin(loader)


class Places:
    """For DataLoader, which wants to begin it itself."""

    def __init__(self, places: Iterable[Place]) -> None:
        self.places = places

    def __iter__(self) -> Iterator[Any]:
        return iter(self.places)
