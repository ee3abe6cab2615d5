"""Divides a user's DataLoader among the ranks.

The batches of all ranks in a round equal one larger batch of a single process: every sample once,
in the same order. At the end of an epoch, a rank without samples gets a stand-in batch that is not
counted. It needs one because it takes part in every collective.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, NoReturn

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from orchestrator.common.errors import CheckFailed
from orchestrator.common.text import Say
from orchestrator.config.parse import check_one_of
from orchestrator.engine.data.batch import Batches, Micro, TrainingPlace, ignore_signals
from orchestrator.engine.data.rounds import EPOCHS, OurOrder, OwnOrder, Round
from orchestrator.engine.ranks.randomness import seed_all
from orchestrator.engine.ranks.ranks import Ranks, gather_values


def share_of_loader(loader: Any, ranks: Ranks, seed: int, stream: str, name: str) -> Shard:
    """Return this rank's share of a loader. Raise CheckFailed if it cannot be divided."""
    check_one_of("stream", stream, ("dealt", "own"))
    if not isinstance(loader, Iterable):
        raise CheckFailed(f"{name} is a {type(loader).__name__}, not a DataLoader")
    sampler = drawn_by(loader)[0] if isinstance(loader, DataLoader) else None
    knows_ranks = hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")
    if knows_ranks:
        refuse_other_ranks(sampler, ranks, name)
    each = knows_ranks or stream == "own"
    if type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset):
        return MapShard(loader, ranks, seed, each=each)
    return StreamShard(loader, ranks, seed, each=each)


def drawn_by(loader: DataLoader[Any]) -> tuple[Any, int | None, bool]:
    """Return the loader's sampler, its batch size, and whether it drops an incomplete batch.

    The size is None if each draw is a whole batch.
    """
    around = loader.batch_sampler
    if type(around) is BatchSampler:
        return around.sampler, around.batch_size, around.drop_last
    return loader.sampler if around is None else around, None, False


def does_shuffle(sampler: Any) -> bool | None:
    """Return whether one of torch's plain samplers shuffles, or None for any other sampler."""
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is DistributedSampler:
        return sampler.shuffle
    plain = type(sampler) is RandomSampler and not sampler.replacement
    return True if plain and len(sampler) == len(sampler.data_source) else None


def refuse_other_ranks(sampler: Any, ranks: Ranks, name: str) -> None:
    """Raise CheckFailed if a sampler is made for another rank or number of ranks."""
    samplers = gather_values((sampler.rank, sampler.num_replicas, len(sampler)))
    if samplers != [(rank, ranks.world, samplers[0][2]) for rank in range(ranks.world)]:
        raise CheckFailed(
            f"the {type(sampler).__name__} of {name} does not fit: it is made for rank"
            f" {sampler.rank} of {sampler.num_replicas}, this is rank {ranks.rank} of"
            f" {ranks.world}",
            "leave the sampler out: the Trainer deals the samples out by itself",
        )


def rebuild_loader(loader: DataLoader[Any], **order: Any) -> DataLoader[Any]:
    """Return a new DataLoader with a user's public settings and another order.

    Its workers start in each epoch, so that their seeds are those of the epoch.
    """
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=functools.partial(ignore_signals, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        **order,
    )


def refuse_empty() -> NoReturn:
    raise CheckFailed(
        "there is not one batch to train or evaluate with",
        "with drop_last=True, the dataset has to hold batch_size samples for every rank",
    )


class Shard(Batches):
    """The batches of one rank. Each kind of loader has a subclass."""

    order: OurOrder | OwnOrder

    def __init__(self, loader: Any, ranks: Ranks, seed: int) -> None:
        super().__init__(ranks)
        self.loader, self.seed = loader, seed

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        """Yield the batches of an epoch. They depend only on its number and the position."""
        around = getattr(self.loader, "batch_sampler", None)
        owners = [getattr(self.loader, name, None) for name in ("sampler", "dataset")]
        for owner in (self.loader, *owners, around, getattr(around, "sampler", None)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(number)
        empty = position == 0
        for micro in self._batches(number, position):
            yield micro
            empty, position = False, position + self.round_size
            self.order.reached(number, position)
        if empty:
            refuse_empty()

    def record(self, epoch: int, position: int) -> dict[str, Any]:
        return self.order.record(epoch, position)

    def expect(
        self, saved: Mapping[str, Any], place: TrainingPlace, say: Say, *, resumed: bool
    ) -> None:
        self.order.expect(saved, place, say, resumed=resumed)

    def _batches(self, number: int, position: int) -> Iterator[Micro]:
        raise NotImplementedError


class MapShard(Shard):
    """A dataset with a length. This object is the batch sampler of the rebuilt loader."""

    def __init__(
        self, loader: DataLoader[Any], ranks: Ranks, seed: int, each: bool = False
    ) -> None:
        super().__init__(loader, ranks, seed)
        self.sampler, self.batch_size, drop_last = drawn_by(loader)
        # Rounds that the DataLoader has drawn and not yet returned as batches.
        self.begun: deque[Round] = deque()
        self.rounds: Iterator[Round] = iter(())
        if loader.batch_sampler is None:
            self.rebuilt = rebuild_loader(loader, sampler=self, batch_size=None)
        else:
            self.rebuilt = rebuild_loader(loader, batch_sampler=self)
        dealt = f", dealt out to {ranks.world} ranks" if ranks.world > 1 else ""
        drawn, shuffle, name = self.sampler, does_shuffle(self.sampler), type(self.sampler).__name__
        # torch's plain samplers know no ranks, so their draws are no rank's own part.
        each = each and not type(self.sampler).__module__.startswith("torch.")
        if type(self.sampler) is DistributedSampler:
            drawn = loader.dataset
        many = len(drawn) if isinstance(drawn, Sized) else None
        if shuffle is not None:
            self.order = OurOrder(
                many or 0,
                seed,
                ranks,
                shuffle=shuffle,
                batch_size=self.batch_size or 1,
                drop_last=drop_last,
            )
            self.description = self.order.description + dealt
            if not self.order.end(0):
                refuse_empty()
        else:
            self.order = OwnOrder(
                lambda: iter(self.sampler),
                self.sampler,
                name,
                ranks,
                seed,
                each=each,
                batch_size=self.batch_size,
                drop_last=drop_last,
                is_sampler=True,
            )
            what = "samples" if self.batch_size else "batches"
            what = what if many is None else f"{many:,} {what}"
            self.description = f"{what}, as rank 0's {name} draws them in each epoch{dealt}"
            if each:
                self.description = f"{what} for each rank by its own {name}"
        if many is not None and self.batch_size:
            self.samples = many * (ranks.world if each and shuffle is None else 1)

    def __iter__(self) -> Iterator[Any]:
        """Yield the items of each batch of this rank to the DataLoader."""
        for current in self.rounds:
            self.begun.append(current)
            yield current.items if self.batch_size else current.items[0]

    def _batches(self, number: int, position: int) -> Iterator[Micro]:
        self.begun.clear()
        self.rounds = self.order.rounds(number, position)
        self._seed(number, -1)
        loaded = iter(self.rebuilt)
        for index in itertools.count(position // self.round_size):
            # The random numbers of a dataset depend only on the position of the batch.
            self._seed(number, index)
            data = next(loaded, None)
            if data is None and not self.begun:
                return
            items, real = self.begun.popleft()
            drawn = items if self.batch_size else items[0]
            several = isinstance(drawn, (list, tuple))
            ids: list[Any] = [*drawn] if several else [drawn]
            known = ids if all(isinstance(item, int) for item in ids) else None
            yield Micro(data, known, real, len(ids) if several else None)

    def _seed(self, epoch: int, index: int) -> None:
        seed_all(self.seed, EPOCHS + epoch, index + 1, self.ranks.rank)


class StreamShard(Shard):
    """A dataset without a length, or any iterable of batches. Every rank reads it."""

    def __init__(self, loader: Any, ranks: Ranks, seed: int, each: bool) -> None:
        super().__init__(loader, ranks, seed)
        holder = source = loader
        size = getattr(loader, "batch_size", None)
        if type(loader) is DataLoader:
            loader = rebuild_loader(loader, batch_size=size, drop_last=loader.drop_last)
            # The state of the workers' copies of a dataset is not available here.
            source, holder = loader.dataset, None if loader.num_workers else loader.dataset
        self.order = OwnOrder(
            lambda: iter(loader),
            holder,
            type(source).__name__,
            ranks,
            seed,
            batch_size=size,
            each=each,
        )
        self.description = "a stream of batches"
        if ranks.world > 1 and each:
            self.description += ": every rank takes its own stream as its part"
        elif ranks.world > 1:
            self.description += (
                f": every rank reads all of it and keeps each {ranks.world}th"
                ' (stream="own" if the dataset gives every rank its own part)'
            )

    def _batches(self, number: int, position: int) -> Iterator[Micro]:
        for items, real in self.order.rounds(number, position):
            yield Micro(items[0], None, real)
