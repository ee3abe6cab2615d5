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
from orchestrator.engine.data.batch import Micro, Shield, begin
from orchestrator.engine.data.sample_order import Order
from orchestrator.engine.data.sources import Source
from orchestrator.engine.ranks.ranks import Ranks


class TrainingSamples:
    """The config's training samples as the loop's batches: without end, epoch after epoch."""

    endless = True

    def __init__(self, source: Source, config: Config, ranks: Ranks) -> None:
        self.source, self.config, self.ranks = source, config, ranks
        self.order = Order(len(source), config.training.seed, shuffle=config.dataset.shuffle)
        self.batch_size, self.samples = config.training.batch_size, len(source)
        self.round_size = ranks.world * self.batch_size
        training = config.training
        self.description = (
            f"{self.samples:,} samples: {training.max_steps} steps of {ranks.world} ranks x"
            f" {training.gradient_accumulation} micro-batches x {self.batch_size}"
        )

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        return batches(
            self.source, self.order, self.config, self.ranks.rank, self.ranks.world, position
        )


class HeldOutSamples:
    """The config's held-out samples, for evaluations."""

    endless = False

    def __init__(self, source: Source, config: Config, ranks: Ranks) -> None:
        self.source, self.config, self.ranks = source, config, ranks
        self.batch_size, self.samples = config.training.batch_size, len(source)
        self.round_size = ranks.world * self.batch_size
        self.description = f"{self.samples:,} samples"

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        rounds = evaluation(self.source, self.config, self.ranks.rank, self.ranks.world)
        return (batch._replace(real=bool(real)) for batch, real in rounds)


def batches(
    source: Source, order: Order, config: Config, rank: int, world: int, start: int
) -> Iterator[Micro]:
    """Give this rank's micro-batches, without end, from a position in the order of all ranks on."""
    size = config.training.batch_size
    places = (Place(first, size) for first in itertools.count(start + rank * size, world * size))
    return loaded(Samples(source, order), places, config)


def evaluation(
    source: Source, config: Config, rank: int, world: int
) -> Iterator[tuple[Micro, int]]:
    """Give every held-out sample once over all ranks, and how many of each batch are real.

    All ranks get the same number of batches, or one would wait for the others in a collective: a
    rank for which no samples are left gets a batch of one that counts as none.
    """
    size = config.training.batch_size
    rounds = -(-len(source) // (world * size))
    if config.training.eval_batches is not None:
        rounds = min(rounds, config.training.eval_batches)
    firsts = [(number * world + rank) * size for number in range(rounds)]
    real = [min(size, max(0, len(source) - first)) for first in firsts]
    places = [
        Place(first, count) if count else Place(0, 1)
        for first, count in zip(firsts, real, strict=True)
    ]
    in_order = Order(len(source), 0, shuffle=False)
    return zip(loaded(Samples(source, in_order), places, config), real, strict=True)


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
            yield batch._replace(data=pin(batch.data)) if pinned else batch
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


def pin(data: Any) -> Any:
    """Move a batch to memory from which a GPU copies while it computes."""
    if isinstance(data, Tensor):
        return data.pin_memory()
    if isinstance(data, dict):
        return {name: pin(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)) and not hasattr(data, "_fields"):
        return type(data)(pin(value) for value in data)
    return data
