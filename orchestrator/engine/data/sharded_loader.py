"""A user's DataLoader, shared by the ranks.

The batches that all ranks see together, one of each, are those of one process with a batch as large
as all of theirs: every sample once, in the same order. A rank for which nothing is left at the end
of an epoch gets a batch that counts as none, because it has to take part in every collective.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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
from orchestrator.engine.data.batch import Batches, Micro, seed_all
from orchestrator.engine.data.sample_order import Order
from orchestrator.engine.ranks.ranks import Ranks, gather, host_group
from orchestrator.errors import CheckFailed, UsageError

EPOCHS = 1 << 40  # beyond any step, whose seeds are others


def shared(loader: Any, ranks: Ranks, seed: int, stream: str, name: str) -> Batches:
    """Decide how the ranks share this loader; the result's description says it."""
    one_of("stream", stream, ("dealt", "own"))
    if not isinstance(loader, Iterable):
        raise CheckFailed(f"{name} is a {type(loader).__name__}, not a DataLoader")
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return IterableShard(loader, ranks, seed, stream == "own")
    if isinstance(loader.sampler, DistributedSampler):
        return UserShard(loader, ranks, seed, name)
    return MapShard(loader, ranks, seed)


class Shard:
    """The batches of an epoch, for one rank; a subclass for each kind of loader."""

    description: str
    batch_size: int | None = None
    samples: int | None = None
    endless = False

    def __init__(self, loader: Any, ranks: Ranks, seed: int) -> None:
        self.loader, self.ranks, self.seed = loader, ranks, seed

    @property
    def round_size(self) -> int:
        return self.ranks.world * (self.batch_size or 1)

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        """Draw in the same way, whatever was drawn before."""
        if position % self.round_size:
            raise UsageError(
                f"the checkpoint was saved after {position} samples of epoch {number}, which is no"
                f" multiple of the {self.round_size} that all ranks now take at a time",
                "resume with the same number of ranks and batch size, or from the end of an epoch",
            )
        start = position // self.round_size
        self._seed(number, -1)
        for name in ("sampler", "batch_sampler", "dataset"):
            set_epoch: Any = getattr(getattr(self.loader, name, None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(number)
        draws = self._draws(number, start)
        ahead = next(draws, None)
        if ahead is None and start == 0:
            raise CheckFailed(
                "there is not one batch to train or evaluate with",
                "with drop_last=True, the dataset has to hold batch_size samples for every rank",
            )
        while ahead is not None:
            following = next(draws, None)
            yield ahead._replace(last=following is None)
            ahead = following

    def _draws(self, number: int, start: int) -> Iterator[Micro]:
        raise NotImplementedError

    def _each(self, batches: Iterator[Any], number: int, first: int) -> Iterator[Any]:
        """Let what a dataset draws at random depend on the place of the batch alone."""
        for index in itertools.count(first):
            self._seed(number, index)
            try:
                yield next(batches)
            except StopIteration:
                return

    def _seed(self, epoch: int, index: int) -> None:
        seed_all(self.seed, EPOCHS + epoch, index + 1, self.ranks.rank)


class MapShard(Shard):
    """A dataset with a length. This object is the batch sampler of a copy of the user's loader."""

    def __init__(self, loader: Any, ranks: Ranks, seed: int) -> None:
        super().__init__(loader, ranks, seed)
        self.items: Items = range(0)
        self.start = 0
        self.own = copy.copy(loader)
        batched = type(loader.batch_sampler) is BatchSampler
        self.sampler: Any = loader.sampler
        if loader.batch_sampler is not None and not batched:
            self.sampler = loader.batch_sampler  # the user's own, whose items are batches
        elif batched and loader.batch_size is None:  # a BatchSampler that the user made
            self.sampler = loader.batch_sampler.sampler
        self.batch_size = loader.batch_sampler.batch_size if batched else None
        self.drop_last = loader.batch_sampler.drop_last if batched else loader.drop_last
        # DataLoader lets nobody exchange these after it was made, for fear of a stale iterator.
        which = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(self.own).update({which: self, "_iterator": None})
        self.samples = len(self.sampler) if self.batch_size else None
        many = f", dealt out to {ranks.world} ranks" if ranks.world > 1 else ""
        self.description = f"{self._how()}{many}"

    def _how(self) -> str:
        what = f"{len(self.sampler):,} {'samples' if self.batch_size else 'batches'}"
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
        """Give the DataLoader, or its workers, what each batch of this rank holds."""
        return itertools.islice(self._batches(), self.start, None)

    def __len__(self) -> int:
        return self._dealt().rounds

    def _batches(self) -> Iterator[Any]:
        dealt = self._dealt()
        for index in range(dealt.rounds):
            batch = pick(self.items, dealt.places(index))
            yield batch if self.batch_size else batch[0]

    def _dealt(self) -> Dealt:
        ranks = self.ranks
        drop = self.drop_last and self.batch_size is not None
        return Dealt(len(self.items), self.batch_size or 1, drop, ranks.rank, ranks.world)

    def _draws(self, number: int, start: int) -> Iterator[Micro]:
        self.items, self.start = self._order(number), start
        dealt = self._dealt()
        self._seed(number, -1)
        drawn = self._each(iter(self.own), number, start)
        contents = itertools.islice(self._batches(), start, None)
        for index, (data, content) in enumerate(zip(drawn, contents, strict=False), start):
            yield Micro(data, numbers(content), real=dealt.real(index))

    def _order(self, epoch: int) -> Items:
        """Give the order of all samples (or batches), the same on all ranks."""
        if type(self.sampler) is SequentialSampler:
            return range(len(self.sampler))
        if self._shuffles():
            return Shuffled(len(self.sampler), self.seed, epoch)
        generator = getattr(self.sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(self.seed + epoch)
        drawn = [list(self.sampler) if self.ranks.rank == 0 else []]
        if self.ranks.world > 1:
            dist.broadcast_object_list(drawn, src=0, group=host_group())
        return drawn[0]


class Shuffled:
    """One epoch's permutation, computed for the places that are asked for: nothing is stored."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size, self.epoch = size, epoch
        self.order = Order(size, seed, shuffle=True)

    def __len__(self) -> int:
        return self.size

    def at(self, places: range) -> list[int]:
        return self.order.of_epoch(self.epoch, places)


Items = Sequence[Any] | Shuffled


def pick(items: Items, places: range) -> list[Any]:
    return items.at(places) if isinstance(items, Shuffled) else [items[p] for p in places]


class Dealt:
    """Deal items out: the n-th batches of all ranks together are the n-th of one process.

    All ranks get as many; one for which nothing is left gets the first item, which counts as none.
    """

    def __init__(self, items: int, size: int, drop_last: bool, rank: int, world: int) -> None:
        each = size * world
        self.items = items // each * each if drop_last else items
        self.size, self.rank, self.world = size, rank, world
        self.rounds = -(-self.items // each)

    def places(self, index: int) -> range:
        return self._own(index) or range(1)

    def real(self, index: int) -> bool:
        return bool(self._own(index))

    def _own(self, index: int) -> range:
        first = index * self.size * self.world
        stop = min(first + self.size * self.world, self.items)
        return range(first + self.rank, stop, self.world)


def numbers(content: Any) -> list[int] | None:
    """The numbers of a batch's samples, if that is what the sampler gives."""
    content = content if isinstance(content, (list, tuple)) else [content]
    return list(content) if all(isinstance(item, int) for item in content) else None


class UserShard(Shard):
    """The user's own DistributedSampler, which is only told the epoch."""

    def __init__(self, loader: Any, ranks: Ranks, seed: int, name: str) -> None:
        super().__init__(loader, ranks, seed)
        own = loader.sampler
        samplers = gather((own.rank, own.num_replicas, len(own)))
        if samplers != [(rank, ranks.world, samplers[0][2]) for rank in range(ranks.world)]:
            raise CheckFailed(
                f"the DistributedSampler of {name} does not fit: it is made for rank {own.rank} of"
                f" {own.num_replicas}, this is rank {ranks.rank} of {ranks.world}",
                "leave the sampler out: the Trainer deals the samples out by itself",
            )
        self.batch_size = loader.batch_size
        self.samples = own.total_size
        self.description = f"{own.total_size:,} samples by your DistributedSampler, epochs are set"
        if not own.drop_last and own.total_size > len(loader.dataset):
            extra = own.total_size - len(loader.dataset)
            self.description += f"; it shows {extra} of them twice, to make the ranks equal"

    def _draws(self, number: int, start: int) -> Iterator[Micro]:
        drawn = self._each(iter(self.loader), number, 0)
        return (Micro(data, None) for data in itertools.islice(drawn, start, None))


class IterableShard(Shard):
    """A dataset without a length, or any iterable of batches."""

    def __init__(self, loader: Any, ranks: Ranks, seed: int, own: bool) -> None:
        super().__init__(loader, ranks, seed)
        self.deals = ranks.world > 1 and not own
        self.description = "a stream of batches"
        if self.deals:
            self.description += (
                f": every rank reads all of it and keeps each {ranks.world}th"
                ' (stream="own" if the dataset gives every rank its own part)'
            )
        elif ranks.world > 1:
            self.description += ": every rank takes its own stream as its part"

    def _draws(self, number: int, start: int) -> Iterator[Micro]:
        # The seed of rank 0 for all: streams that are dealt out have to be the same.
        drawn = self._each(iter(self.loader), number, 0)
        if self.ranks.world == 1:
            yield from (Micro(data, None) for data in itertools.islice(drawn, start, None))
            return
        if self.deals:
            drawn = self._checked(drawn)
            drawn = itertools.islice(drawn, self.ranks.rank, None, self.ranks.world)
        yield from itertools.islice(self._together(drawn), start, None)

    def _seed(self, epoch: int, index: int) -> None:
        seed_all(self.seed, EPOCHS + epoch, index + 1, 0 if self.deals else self.ranks.rank)

    def _checked(self, drawn: Iterator[Any]) -> Iterator[Any]:
        """Refuse data that differs between ranks before dealing it; the first batch shows it."""
        first = next(drawn, None)
        prints = gather(fingerprint(first))
        if any(repr(other) != repr(prints[0]) for other in prints):  # NaN is not equal to itself
            raise CheckFailed(
                "the ranks read different streams, so dealing them out would lose batches: the"
                " first batch is not the same on all of them",
                'say stream="own" if the dataset gives every rank its own part; otherwise make its'
                " order depend on what is equal everywhere",
            )
        return drawn if first is None else itertools.chain([first], drawn)

    def _together(self, drawn: Iterator[Any]) -> Iterator[Micro]:
        """Go on until the last rank has no more; who has none shows its last one again."""
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
            yield Micro(before, None, real=real)


def fingerprint(data: Any) -> Any:
    """Describe a batch in few numbers, to be compared."""
    if isinstance(data, Tensor):
        return tuple(data.shape), data.double().sum().item()
    if isinstance(data, dict):
        return {str(key): fingerprint(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [fingerprint(value) for value in data]
    return repr(data)[:200]
