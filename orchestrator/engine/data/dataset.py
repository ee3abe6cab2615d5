"""Batches of a config's samples: this rank's share of them, in the order of all ranks.

1. sources() gives the samples by their index; 2. Order says which index is at which position;
3. the positions are dealt out to the ranks; 4. worker processes load ahead, if asked to.
The state of all this is one number, the position.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from orchestrator.config.schema import Config
from orchestrator.engine.data.batch import Batches, Micro, ignore_signals
from orchestrator.engine.data.sample_order import Order
from orchestrator.engine.data.sources import Source
from orchestrator.engine.ranks.ranks import Ranks

# The position of a batch's first sample, and its samples.
Place = tuple[int, list[int]]


class ConfiguredSamples(Batches):
    """The config's samples as the loop's batches."""

    def __init__(self, source: Source, config: Config, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.source, self.config, self.size = source, config, config.training.batch_size
        self.batch_size, self.samples = self.size, len(source)
        self.description = f"{self.samples:,} samples"

    def _loaded(self, places: Iterable[Place]) -> Iterator[Micro]:
        wanted = self.config.dataloader
        # A place is a whole batch, so the DataLoader makes none.
        loader: DataLoader[Any] = DataLoader(
            Samples(self.source),
            batch_size=None,
            sampler=places,
            num_workers=wanted.num_workers,
            prefetch_factor=wanted.prefetch_factor if wanted.num_workers else None,
            pin_memory=wanted.pin_memory and torch.cuda.is_available(),
            worker_init_fn=functools.partial(ignore_signals, None),
            # Otherwise it would draw from the one that the model uses.
            generator=torch.Generator(),
        )
        return iter(loader)


class TrainingSamples(ConfiguredSamples):
    """Those to train on: without end, epoch after epoch."""

    endless = True

    def __init__(self, source: Source, config: Config, ranks: Ranks) -> None:
        super().__init__(source, config, ranks)
        training = config.training
        self.order = Order(len(source), training.seed, shuffle=config.dataset.shuffle)
        self.description += (
            f": {training.max_steps} steps of {ranks.world} ranks x"
            f" {training.gradient_accumulation} micro-batches x {self.size}"
        )

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        """Return this rank's batches from a position in the order of all ranks on."""
        firsts = itertools.count(position + self.ranks.rank * self.size, self.round_size)
        return self._loaded((at, self.order.indices(at, self.size)) for at in firsts)


class HeldOutSamples(ConfiguredSamples):
    """Those for evaluations: every sample once over all ranks.

    All ranks get the same number of batches, or one would wait for the others in a collective: a
    rank for which no samples are left gets a batch of one that counts as none.
    """

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        whole, first = len(self.source), self.ranks.rank * self.size
        begins = range(0, whole, self.round_size)[: self.config.training.eval_batches]
        shares = [range(whole)[begin + first :][: self.size] for begin in begins]
        drawn = self._loaded((share.start, [*share] or [0]) for share in shares)
        for batch, share in zip(drawn, shares, strict=True):
            yield batch._replace(real=bool(share))


@dataclass(frozen=True)
class Samples(Dataset[Micro]):
    """The dataset of a worker, which makes whole batches."""

    source: Source

    def __getitem__(self, place: Place) -> Micro:
        first, ids = place
        return Micro(self.source.batch(ids, first), ids)
