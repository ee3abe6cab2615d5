"""A user's DataLoader, dealt out to the ranks. Called by trainer.py.

The batches that all ranks see together, one of each, are those of one process with a batch as large
as all of theirs: every sample once, in the same order. A rank for which nothing is left at the end
of an epoch gets a batch that counts as none, because it has to take part in every collective.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from orchestrator.config.parse import one_of
from orchestrator.engine.ranks.ranks import Ranks, gather, host_group
from orchestrator.engine.train import seed_all
from orchestrator.errors import CheckFailed

EPOCHS = 1 << 40  # beyond any step, whose seeds are others


class Micro(NamedTuple):
    """One batch of this rank."""

    data: Any
    real: bool  # else it counts as none
    last: bool  # of its epoch, on all ranks


def dealt(loader: Any, ranks: Ranks, seed: int, stream: str, name: str) -> Deal:
    """How this loader is shared by the ranks; `words` of the result tell it."""
    one_of("stream", stream, ("dealt", "own"))
    if not isinstance(loader, Iterable):
        raise CheckFailed(f"{name} is a {type(loader).__name__}, not a DataLoader")
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return Stream(loader, ranks, seed, stream == "own")
    if isinstance(loader.sampler, DistributedSampler):
        return Kept(loader, ranks, seed, name)
    return Share(loader, ranks, seed)


class Deal:
    """The batches of an epoch, for one rank; a subclass for each kind of loader."""

    words: str

    def __init__(self, loader: Any, ranks: Ranks, seed: int) -> None:
        self.loader, self.ranks, self.seed = loader, ranks, seed

    def epoch(self, number: int, start: int = 0) -> Iterator[Micro]:
        """From its batch `start` on; drawn in the same way, whatever was drawn before."""
        self._seed(number, -1)
        for name in ("sampler", "batch_sampler", "dataset"):
            tell: Any = getattr(getattr(self.loader, name, None), "set_epoch", None)
            if tell is not None:
                tell(number)
        draws = self._draws(number, start)
        ahead = next(draws, None)
        if ahead is None and start == 0:
            raise CheckFailed(
                "there is not one batch to train or evaluate with",
                "with drop_last=True, the dataset has to hold batch_size samples for every rank",
            )
        while ahead is not None:
            following = next(draws, None)
            yield Micro(*ahead, following is None)
            ahead = following

    def _draws(self, number: int, start: int) -> Iterator[tuple[Any, bool]]:
        raise NotImplementedError

    def _each(self, batches: Iterator[Any], number: int, first: int) -> Iterator[Any]:
        """What a dataset draws at random depends on the place of the batch alone."""
        for index in itertools.count(first):
            self._seed(number, index)
            try:
                yield next(batches)
            except StopIteration:
                return

    def _seed(self, epoch: int, index: int) -> None:
        seed_all(self.seed, EPOCHS + epoch, index + 1, self.ranks.rank)


class Share(Deal):
    """A dataset with a length. This object is the batch sampler of a copy of the user's loader."""

    def __init__(self, loader: Any, ranks: Ranks, seed: int) -> None:
        super().__init__(loader, ranks, seed)
        self.mine: list[Any] = []
        self.own = copy.copy(loader)
        plain = type(loader.batch_sampler) is BatchSampler
        self.size = loader.batch_size if plain else None
        self.sampler = loader.sampler if plain or loader.batch_sampler is None else (
            loader.batch_sampler)  # fmt: skip
        # DataLoader lets nobody exchange these after it was made, for fear of a stale iterator.
        which = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(self.own).update({which: self, "_iterator": None})
        many = f", dealt out to {ranks.world} ranks" if ranks.world > 1 else ""
        self.words = f"{self._how()}{many}"

    def _how(self) -> str:
        what = f"{len(self.sampler):,} {'samples' if self.size else 'batches'}"
        if self._shuffles():
            return f"{what}, shuffled by seed {self.seed} and epoch"
        if type(self.sampler) is SequentialSampler:
            return f"{what}, in their order"
        return f"{what}, as rank 0's {type(self.sampler).__name__} draws them in each epoch"

    def _shuffles(self) -> bool:
        own = self.sampler
        if type(own) is not RandomSampler or own.replacement:
            return False
        return len(own) == len(own.data_source)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.mine)

    def __len__(self) -> int:
        return len(self.mine)

    def _draws(self, number: int, start: int) -> Iterator[tuple[Any, bool]]:
        batches, padded = deal(
            self._order(number), self.size, self.own.drop_last, self.ranks.rank, self.ranks.world
        )
        self.mine = batches[start:]
        self._seed(number, -1)
        drawn = self._each(iter(self.own), number, start)
        for index, data in enumerate(drawn, start):
            yield data, not (padded and index == len(batches) - 1)

    def _order(self, epoch: int) -> Sequence[Any]:
        """Of all samples (or batches), the same on all ranks."""
        if type(self.sampler) is SequentialSampler:
            return range(len(self.sampler))
        if self._shuffles():  # as torch's DistributedSampler does
            draw = torch.Generator().manual_seed(self.seed + epoch)
            return torch.randperm(len(self.sampler), generator=draw).tolist()
        generator = getattr(self.sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(self.seed + epoch)
        told = [list(self.sampler) if self.ranks.rank == 0 else []]
        if self.ranks.world > 1:
            dist.broadcast_object_list(told, src=0, group=host_group())
        return told[0]


def deal(
    items: Sequence[Any], size: int | None, drop_last: bool, rank: int, world: int
) -> tuple[list[Any], bool]:
    """(this rank's batches, whether the last of them counts as none). Without a size, an item is
    a batch. All ranks get as many; together, the n-th of each are the n-th of one process."""
    each = size or 1
    if drop_last and size:
        items = items[: len(items) // (each * world) * each * world]
    mine = list(items[rank::world])
    rounds = -(-len(items) // (each * world))
    padded = -(-len(mine) // each) < rounds
    if padded:
        mine.append(items[0])
    if size is None:
        return mine, padded
    return [mine[first : first + size] for first in range(0, len(mine), size)], padded


class Kept(Deal):
    """The user's own DistributedSampler, which is only told the epoch."""

    def __init__(self, loader: Any, ranks: Ranks, seed: int, name: str) -> None:
        super().__init__(loader, ranks, seed)
        own = loader.sampler
        told = gather((own.rank, own.num_replicas, len(own)))
        if told != [(rank, ranks.world, told[0][2]) for rank in range(ranks.world)]:
            raise CheckFailed(
                f"the DistributedSampler of {name} does not fit: it is made for rank {own.rank} of"
                f" {own.num_replicas}, this is rank {ranks.rank} of {ranks.world}",
                "leave the sampler out: the Trainer deals the samples out by itself",
            )
        self.words = f"{own.total_size:,} samples by your DistributedSampler, epochs are set"
        if not own.drop_last and own.total_size > len(loader.dataset):
            extra = own.total_size - len(loader.dataset)
            self.words += f"; it shows {extra} of them twice, to make the ranks equal"

    def _draws(self, number: int, start: int) -> Iterator[tuple[Any, bool]]:
        drawn = self._each(iter(self.loader), number, 0)
        return ((data, True) for data in itertools.islice(drawn, start, None))


class Stream(Deal):
    """A dataset without a length, or any iterable of batches."""

    def __init__(self, loader: Any, ranks: Ranks, seed: int, own: bool) -> None:
        super().__init__(loader, ranks, seed)
        self.deals = ranks.world > 1 and not own
        self.words = "a stream of batches"
        if self.deals:
            self.words += (
                f": every rank reads all of it and keeps each {ranks.world}th"
                ' (stream="own" if the dataset gives every rank its own part)'
            )
        elif ranks.world > 1:
            self.words += ": every rank takes its own stream as its part"

    def _draws(self, number: int, start: int) -> Iterator[tuple[Any, bool]]:
        # The seed of rank 0 for all: streams that are dealt out have to be the same.
        drawn = self._each(iter(self.loader), number, 0)
        if self.ranks.world == 1:
            yield from ((data, True) for data in itertools.islice(drawn, start, None))
            return
        if self.deals:
            drawn = self._checked(drawn)
            drawn = itertools.islice(drawn, self.ranks.rank, None, self.ranks.world)
        yield from itertools.islice(self._together(drawn), start, None)

    def _seed(self, epoch: int, index: int) -> None:
        seed_all(self.seed, EPOCHS + epoch, index + 1, 0 if self.deals else self.ranks.rank)

    def _checked(self, drawn: Iterator[Any]) -> Iterator[Any]:
        """What is dealt out has to be the same on all ranks; the first batch shows it."""
        first = next(drawn, None)
        told = gather(fingerprint(first))
        if any(one != told[0] for one in told):
            raise CheckFailed(
                "the ranks read different streams, so dealing them out would lose batches: the"
                " first batch is not the same on all of them",
                'say stream="own" if the dataset gives every rank its own part; otherwise make its'
                " order depend on what is equal everywhere",
            )
        return drawn if first is None else itertools.chain([first], drawn)

    def _together(self, drawn: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        """Until the last rank has no more; who has none shows its last one again."""
        before = None
        while True:
            data = next(drawn, None)
            have = torch.tensor([data is not None, data is not None or before is not None]).int()
            most, least = have.clone(), have
            dist.all_reduce(most, dist.ReduceOp.MAX, group=host_group())
            dist.all_reduce(least, dist.ReduceOp.MIN, group=host_group())
            if not most[0]:
                return
            if not least[1]:
                raise CheckFailed(
                    "the stream has fewer batches than there are ranks, and some got none",
                    "use fewer ranks, or smaller batches",
                )
            real, before = data is not None, before if data is None else data
            yield before, real


def fingerprint(data: Any) -> Any:
    """A batch in few numbers, to be compared."""
    if isinstance(data, Tensor):
        return tuple(data.shape), data.double().sum().item()
    if isinstance(data, dict):
        return {str(key): fingerprint(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [fingerprint(value) for value in data]
    return repr(data)[:200]
