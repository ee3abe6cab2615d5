"""A user's DataLoader, shared by the ranks.

The batches that all ranks see together, one of each, are those of one process with a batch as large
as all of theirs: every sample once, in the same order. A rank for which nothing is left at the end
of an epoch gets a batch that counts as none, because it has to take part in every collective.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

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

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.common.text import Say
from orchestrator.config.parse import one_of
from orchestrator.engine.data import batch
from orchestrator.engine.data.batch import Batches, Before, Micro
from orchestrator.engine.data.draws import (
    DRAWN_AT_ONCE,
    EPOCHS,
    Asked,
    Draws,
    Epoch,
    described,
    folded,
    inner,
)
from orchestrator.engine.data.sample_order import Order
from orchestrator.engine.models.losses import Size, is_unclear, parts_in, shapes_in
from orchestrator.engine.ranks.randomness import randomness_kept, seed_all
from orchestrator.engine.ranks.ranks import Ranks, from_rank_0, gather, host_group

T = TypeVar("T")

STREAM = "a stream"
PLACES_AT_ONCE = 1 << 11  # whose samples are computed at a time
ADDRESS = re.compile(r"\b0x[0-9a-f]+")  # of an object, in each process another
DRAWS_COMPARED = 1 << 10  # of the first piece


def shared(loader: Any, ranks: Ranks, seed: int, stream: str, name: str, first: int = 0) -> Shard:
    """Decide how the ranks share this loader; the result's description says it.

    `first`: with how many ranks the job began, if not with these.
    """
    one_of("stream", stream, ("dealt", "own"))
    if not isinstance(loader, Iterable):
        raise CheckFailed(f"{name} is a {type(loader).__name__}, not a DataLoader")
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return IterableShard(loader, ranks, seed, stream == "own", first)
    if (sampler := knows_ranks(loader)) is not None:
        refuse_other_ranks(sampler, ranks, name)
        if type(sampler) is DistributedSampler:
            return MapShard(loader, ranks, seed, first, Parts(sampler, first or ranks.world))
        return UserShard(loader, sampler, ranks, seed, first)
    if stream == "own" and not is_torchs(loader):
        return IterableShard(loader, ranks, seed, True, first)
    return MapShard(loader, ranks, seed, first)


def knows_ranks(loader: DataLoader[Any]) -> Any:
    """Return the sampler, or batch sampler, that is made for one of several ranks, if one is."""
    for sampler in (loader.sampler, loader.batch_sampler):
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            return sampler
    around = loader.batch_sampler
    within: Any = around.sampler if type(around) is BatchSampler else None
    return within if type(within) is DistributedSampler else None


def refuse_other_ranks(sampler: Any, ranks: Ranks, name: str) -> None:
    """Refuse a sampler that is made for another rank, or for another number of them."""
    samplers = gather((sampler.rank, sampler.num_replicas, len(sampler)))
    if samplers != [(rank, ranks.world, samplers[0][2]) for rank in range(ranks.world)]:
        raise CheckFailed(
            f"the {type(sampler).__name__} of {name} does not fit: it is made for rank"
            f" {sampler.rank} of {sampler.num_replicas}, this is rank {ranks.rank} of"
            f" {ranks.world}",
            "leave the sampler out: the Trainer deals the samples out by itself",
        )


def is_torchs(loader: DataLoader[Any]) -> bool:
    """Tell whether torch's own samplers draw, which know nothing of ranks."""
    around = loader.batch_sampler
    drawing = [loader.sampler] + ([] if around is None else [around, inner(around)])
    return all(type(sampler).__module__.startswith("torch.utils.data") for sampler in drawing)


def copied(loader: Any, **changes: Any) -> Any:
    """Copy a user's loader, with changes. A resume begins new workers and a new generator, so every
    epoch does; batches come in their order, since a rank with none left counts its last as none."""
    again = copy.copy(loader)
    always = {"_iterator": None, "generator": None, "persistent_workers": False, "in_order": True}
    if getattr(again, "num_workers", 0):
        changes["worker_init_fn"] = batch.Shield(again.worker_init_fn)
    # DataLoader lets nobody exchange these after it was made, for fear of a stale iterator.
    vars(again).update(always | changes)
    return again


def refuse_empty() -> NoReturn:
    raise CheckFailed(
        "there is not one batch to train or evaluate with",
        "with drop_last=True, the dataset has to hold batch_size samples for every rank",
    )


class Shard(Batches):
    """The batches of an epoch, for one rank; a subclass for each kind of loader."""

    interleaved = False  # the n-th samples of all ranks' batches follow each other in the order
    may_be_own = False  # whether stream="own" says something of it
    begins_anywhere = False  # also where no round of these ranks begins: others were there before
    order_of = "your loader"  # what alone knows the order of the samples
    alternative = ""  # what goes on with any number of ranks

    def __init__(self, loader: Any, ranks: Ranks, seed: int) -> None:
        super().__init__(ranks)
        self.loader, self.seed = loader, seed
        self.draws: Draws | None = None  # of a sampler of the program's own
        self.order = ""  # else: what says in which order the samples come

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        """Draw in the same way, whatever was drawn before."""
        if position % self.round_size and not self.begins_anywhere:
            raise UsageError(
                f"the checkpoint was saved after {position} samples of epoch {number}, which is no"
                f" multiple of the {self.round_size} that all ranks now take at a time, and only"
                f" {self.order_of} knows what is left",
                "resume with as many ranks and the same batch size as before, or from the end of an"
                f" epoch; {self.alternative} goes on with any number of ranks",
            )
        self._seed(number, -1)
        self._tell(number)
        empty = position == 0
        for micro in self._draws(number, position):
            yield micro
            empty = False
        if empty:
            refuse_empty()

    def _tell(self, number: int) -> None:
        """Tell what can be told which epoch it is."""
        for name in ("sampler", "batch_sampler", "dataset"):
            owner = getattr(self.loader, name, None)
            asked = self.draws is not None and owner is self.draws.sampler  # it is told there
            if (set_epoch := getattr(owner, "set_epoch", None)) is not None and not asked:
                set_epoch(number)

    def record(self, epoch: int, position: int) -> dict[str, Any]:
        return {"by": self.order} if self.draws is None else self.draws.record(epoch, position)

    def expect(self, before: Before) -> None:
        if self.draws is not None:
            drew = before.by.draws if isinstance(before.by, Shard) else None
            self.draws.expect(before, drew)
        elif before.position and before.saved.get("by", self.order) != self.order:
            before.say(
                f"WARNING: epoch {before.epoch} was begun with {described(before.saved)}, and goes"
                f" on with {self.order}: some samples may come twice in it, and some not at all"
            )

    def unrepeatable(self, epoch: int, position: int) -> str:
        return "" if self.draws is None else self.draws.unrepeatable(epoch, position)

    def _draws(self, number: int, position: int) -> Iterator[Micro]:
        raise NotImplementedError

    def _seeded(self, batches: Iterator[Any], number: int, first: int) -> Iterator[Any]:
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

    def __init__(
        self, loader: Any, ranks: Ranks, seed: int, first: int = 0, parts: Parts | None = None
    ) -> None:
        super().__init__(loader, ranks, seed)
        self.first = first or ranks.world
        self.rounds: Iterator[Round] = iter(())
        self.begun: deque[Round] = deque()  # given to the DataLoader, and not yet loaded
        self.compared = ranks.world == 1  # the draws of all ranks
        batched = type(loader.batch_sampler) is BatchSampler
        self.sampler: Any = loader.sampler
        if loader.batch_sampler is not None and not batched:
            self.sampler = loader.batch_sampler  # the user's own, whose items are batches
        elif batched and loader.batch_size is None:  # a BatchSampler that the user made
            self.sampler = loader.batch_sampler.sampler
        self.sampler = self.sampler if parts is None else parts
        self.batch_size = loader.batch_sampler.batch_size if batched else None
        self.drop_last = loader.batch_sampler.drop_last if batched else loader.drop_last
        which = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self.copy = copied(loader, **{which: self}, **counting(loader))
        self.length = len(self.sampler) if hasattr(self.sampler, "__len__") else None
        self.samples = self.length if self.batch_size else None
        self.interleaved, self.begins_anywhere = bool(self.batch_size), True
        known = parts is not None or type(self.sampler) is SequentialSampler or self._shuffles()
        self.at_once = DRAWN_AT_ONCE  # nobody sees how early torch's own samplers draw
        if not is_torchs(loader):
            self.at_once = math.lcm(self.first, ranks.world) * (self.batch_size or 1)
        if known:
            self.order = self._how()
        else:
            self.draws = Draws(self.sampler, ranks, seed, repeats=is_torchs(loader))
        if is_torchs(loader) and not self._dealt(self.length or 0).rounds:
            refuse_empty()  # known before anything is trained
        dealt = ranks.world > 1 and parts is None
        many = f", dealt out to {ranks.world} ranks" if dealt else ""
        self.description = f"{self._how()}{many}"

    def _how(self) -> str:
        what = "samples" if self.batch_size else "batches"
        if self.length is not None:
            what = f"{self.length:,} {what}"
        if isinstance(self.sampler, Parts):
            return f"{what} by your DistributedSampler, epochs are set{self.sampler.twice()}"
        if self._shuffles():
            return f"{what}, shuffled by seed {self.seed} and epoch"
        if type(self.sampler) is SequentialSampler:
            return f"{what}, in their order"
        return f"{what}, as rank 0's {type(self.sampler).__name__} draws them in each epoch"

    def _shuffles(self) -> bool:
        sampler = self.sampler
        if type(sampler) is not RandomSampler or sampler.replacement:
            return False
        return len(sampler) == len(sampler.data_source)

    def __iter__(self) -> Iterator[Any]:
        """Give the DataLoader, or its workers, what each batch of this rank holds."""
        for current in self.rounds:
            self.begun.append(current)
            yield current.items if self.batch_size else current.items[0]

    def _dealt(self, items: int, start: int = 0) -> Dealt:
        rank, world = self.ranks.rank, self.ranks.world
        return Dealt(items, self.batch_size or 1, self._drops(), rank, world, start, self.first)

    def _drops(self) -> bool:
        return self.drop_last and self.batch_size is not None

    def _draws(self, number: int, position: int) -> Iterator[Micro]:
        self.rounds, self.begun = self._rounds(number, position), deque()
        self._seed(number, -1)
        for data in self._seeded(batch.begin(self.copy), number, position // self.round_size):
            items, real = self.begun.popleft()
            content = items if self.batch_size else items[0]
            size = Size(len(content)) if isinstance(content, (list, tuple)) else None
            micro = micro_of(data)
            size = size if micro.size is None else micro.size
            yield micro._replace(ids=numbers(content), real=real, size=size)

    def _rounds(self, epoch: int, position: int) -> Iterator[Round]:
        """Give what this rank has of each batch of all ranks, in the same order on all of them."""
        if isinstance(self.sampler, Parts):
            known = self.sampler.of_epoch(epoch)
            samples = functools.partial(picked, known)
        elif type(self.sampler) is SequentialSampler or self._shuffles():
            order = Order(len(self.sampler), self.seed, shuffle=self._shuffles())
            samples = functools.partial(order.of_epoch, epoch)
        else:
            yield from self._drawn(epoch, position)
            return
        yield from self._dealt(len(self.sampler), position).of(samples)

    def _drawn(self, epoch: int, position: int) -> Iterator[Round]:
        """Deal out what rank 0's sampler draws from a position on."""
        at_once = math.lcm(self.first, self.ranks.world) * (self.batch_size or 1)
        first: list[Any] = []  # shown by a rank for which nothing is left
        assert self.draws is not None
        for items in whole_rounds(self._pieces(self.draws, epoch, position), at_once):
            first = first or items[:1]
            yield from self._dealt(len(items)).of(functools.partial(picked, items), first)
        self.draws.end()

    def _pieces(self, draws: Draws, epoch: int, position: int) -> Iterator[list[Any]]:
        """Draw by rank 0's sampler, piece by piece: it may have no end, and learn in each step."""
        drawn = draws.begin(epoch, position)
        self.compared = self.compared or position > 0 or epoch > draws.since
        many = self.at_once
        while many == self.at_once:
            piece = [] if drawn is None else drawn.take(self.at_once)
            piece = self._agreed(piece, epoch)
            many = len(piece)
            yield piece

    def _agreed(self, piece: list[Any], epoch: int) -> list[Any]:
        """Give rank 0's piece to all; the first is compared with those of the others."""
        if not self.compared:
            self.compared = True
            mine = piece if self.ranks.rank == 0 else Epoch(self.sampler, self.seed, epoch).take(
                self.at_once)  # fmt: skip
            shown = {repr(sample)[:100] for sample in flat(mine[:DRAWS_COMPARED])}
            others = gather(shown)
            apart = any(others[0] and other and not others[0] & other for other in others[1:])
            if apart and from_rank_0(self._is_part(mine)):
                raise CheckFailed(
                    f"every rank's {type(self.sampler).__name__} draws other samples, so dealing"
                    " out those of rank 0 would lose the rest",
                    'say stream="own" if it gives every rank its own part; otherwise leave the'
                    " parts to the Trainer",
                )
        return from_rank_0(piece)

    def _is_part(self, piece: list[Any]) -> bool:
        """Tell whether all ranks would have to draw so many to see the whole dataset: two samplers
        that draw at random from all samples may begin with different ones, too."""
        if not hasattr(self.loader.dataset, "__len__"):
            return False
        if self.length is None:
            return True
        samples = self.length * len(flat(piece)) / max(1, len(piece))
        return samples * (self.ranks.world - 1) < len(self.loader.dataset)


class Round(NamedTuple):
    """One batch of this rank: its samples, or the one batch that a batch sampler made of them."""

    items: list[Any]
    real: bool


class Parts:
    """The samples that all ranks draw together, where each has torch's own DistributedSampler.

    The samplers take turns in one order, which depends on their number only at its end. The end is
    made for the ranks that the job began with, so other ranks can go on after any sample.
    """

    def __init__(self, sampler: DistributedSampler[Any], first: int) -> None:
        self.copy, self.first = sampler, first

    def _sampler(self, ranks: int) -> DistributedSampler[Any]:
        like = self.copy
        return DistributedSampler(like.dataset, ranks, 0, like.shuffle, like.seed, like.drop_last)

    def __len__(self) -> int:
        return self._sampler(self.first).total_size

    def twice(self) -> str:
        """Say how many samples are repeated, after what it is that repeats them."""
        extra = len(self) - len(self._sampler(1))
        return f"; it shows {extra} of them twice, to make the ranks equal" if extra > 0 else ""

    def of_epoch(self, epoch: int) -> list[int]:
        alone = self._sampler(1)
        alone.set_epoch(epoch)
        return list(itertools.islice(itertools.cycle(alone), len(self)))


def picked(items: Sequence[Any], places: range) -> list[Any]:
    return [items[place] for place in places]


def whole_rounds(pieces: Iterable[list[T]], at_once: int) -> Iterator[list[T]]:
    """Put pieces together so that only the last list is no multiple of a round."""
    left: list[T] = []
    for piece in pieces:
        left += piece
        whole = len(left) // at_once * at_once
        if whole:
            yield left[:whole]
            left = left[whole:]
    if left:
        yield left


class Dealt:
    """Deal items out: the n-th batches of all ranks together are the n-th of one process.

    All ranks get as many; one for which nothing is left gets the first item, which counts as none.
    """

    def __init__(
        self,
        items: int,
        size: int,
        drop_last: bool,
        rank: int,
        world: int,
        start: int = 0,  # what comes before it was dealt out already
        first: int = 0,  # ranks that the job began with: they decide what is dropped, if they can
    ) -> None:
        at_once = size * world
        kept = items // (size * (first or world)) * size * (first or world)
        if kept < start or (kept - start) % at_once:
            kept = start + (items - start) // at_once * at_once
        self.start, self.items = start, kept if drop_last else items
        self.size, self.rank, self.world = size, rank, world
        self.rounds = -(-(self.items - start) // at_once)

    def of(self, samples: Callable[[range], list[T]], idle: Sequence[T] = ()) -> Iterator[Round]:
        """Give this rank's batches of the samples at some places, which takes about as long for
        hundreds of them as for one. `idle`: of a batch that counts as none."""
        at_once = max(1, PLACES_AT_ONCE // self.size)
        for index in range(0, self.rounds, at_once):
            many = min(at_once, self.rounds - index)
            items = samples(self._share_of(index, many))
            for first in range(0, many * self.size, self.size):
                share = items[first : first + self.size]
                yield Round(share or [*idle] or samples(range(1)), bool(share))

    def _share_of(self, index: int, many: int) -> range:
        first = self.start + index * self.size * self.world
        stop = min(first + many * self.size * self.world, self.items)
        return range(min(first + self.rank, stop), stop, self.world)  # which torch's arange takes


def flat(items: list[Any]) -> list[Any]:
    """Give the samples of batches, or of samples."""
    return [
        sample for item in items for sample in (item if isinstance(item, (list, tuple)) else [item])
    ]


def numbers(content: Any) -> list[int] | None:
    """Return the numbers of a batch's samples, if that is what the sampler gives."""
    content = content if isinstance(content, (list, tuple)) else [content]
    return list(content) if all(isinstance(item, int) for item in content) else None


class UserShard(Shard):
    """A sampler of the user's that gives each rank its part; told only the epoch."""

    interleaved = True
    alternative = "torch's own DistributedSampler, or none (the Trainer deals the samples out),"

    def __init__(self, loader: Any, sampler: Any, ranks: Ranks, seed: int, first: int) -> None:
        super().__init__(loader, ranks, seed)
        self.order_of = f"your {type(sampler).__name__}"
        self.batch_size, self.part = loader.batch_size, len(sampler)
        changes = counting(loader)
        self.copy, self.asked = asking(loader, ranks, seed, self.round_size, **changes)
        self.draws = self.asked.draws
        whole = self.part * ranks.world
        self.samples = whole if self.batch_size else None
        what = "samples" if self.batch_size else "batches"
        self.description = f"{whole:,} {what} by {self.order_of}, epochs are set"
        extra = whole - len(loader.dataset)
        if isinstance(sampler, DistributedSampler) and not sampler.drop_last and extra > 0:
            self.description += f"; it shows {extra} of them twice, to make the ranks equal"
        if first not in (0, ranks.world):
            self.description += (
                f" (WARNING: with {ranks.world} ranks in place of {first} the parts are others:"
                " in an epoch that others had begun, some samples may come twice, some not at all)"
            )

    def _draws(self, number: int, position: int) -> Iterator[Micro]:
        first = self.asked.begin(number, position)
        drawn = self._seeded(batch.begin(self.copy), number, first)
        yield from map(micro_of, drawn)


def asking(loader: Any, ranks: Ranks, seed: int, moves: int, **changes: Any) -> tuple[Any, Asked]:
    """Copy a loader whose sampler draws for this rank alone, so that what it draws is noted."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    asked = Asked(Draws(getattr(loader, name), ranks, seed, moves=moves))
    return copied(loader, **{name: asked}, **changes), asked


class IterableShard(Shard):
    """A dataset without a length, or any iterable of batches."""

    may_be_own = True
    alternative = 'a stream that is the same on all ranks (stream="dealt")'

    def __init__(self, loader: Any, ranks: Ranks, seed: int, is_part: bool, first: int) -> None:
        super().__init__(loader, ranks, seed)
        self.copy: Any = loader
        self.order = STREAM
        self.asked: Asked | None = None  # of a dataset with a length
        self.opened = Opened()
        if isinstance(loader, DataLoader):
            changes = counting(loader)
            if isinstance(loader.dataset, IterableDataset):
                self.copy = copied(loader, **changes)
            else:
                self.copy, self.asked = asking(loader, ranks, seed, ranks.world, **changes)
                self.draws = self.asked.draws
        self.deals = self.begins_anywhere = ranks.world > 1 and not is_part
        self.description = "a stream of batches"
        if self.deals:
            self.description += (
                f": every rank reads all of it and keeps each {ranks.world}th"
                ' (stream="own" if the dataset gives every rank its own part)'
            )
        elif ranks.world > 1:
            self.description += ": every rank takes its own stream as its part"
        if is_part and first not in (0, ranks.world):
            self.description += (
                f" (WARNING: with {ranks.world} ranks in place of {first} the parts are others:"
                " some batches may come twice, some not at all)"
            )

    def _draws(self, number: int, position: int) -> Iterator[Micro]:
        # The seed of rank 0 for all: streams that are dealt out have to be the same.
        rank, world = self.ranks.rank, self.ranks.world
        left_out = 0
        if self.asked is None:
            drawn = self._opened(number, position)
        else:
            left_out = self.asked.begin(number, position, latest=True)
            drawn = self._seeded(batch.begin(self.copy), number, left_out)
        if world == 1:
            for data in itertools.islice(drawn, position - left_out, None):
                yield micro_of(data)
            return
        if self.deals:
            drawn = self._checked(drawn)
            drawn = every(drawn, rank, world, position)
        yield from self._together(drawn, position // world - left_out)

    def _seed(self, epoch: int, index: int) -> None:
        seed_all(self.seed, EPOCHS + epoch, index + 1, 0 if self.deals else self.ranks.rank)

    # -- a stream that is read again after a resume -----------------------------------------------

    def record(self, epoch: int, position: int) -> dict[str, Any]:
        if self.asked is not None:
            return super().record(epoch, position)
        prints = self.opened.prints
        return {"by": STREAM, "first": prints.get(epoch), "last": prints.get(epoch - 1)}

    def expect(self, before: Before) -> None:
        known, by = before.saved.get("first" if before.position else "last"), before.by
        if isinstance(by, IterableShard) and by.loader is self.loader:
            self.opened = by.opened
        elif by is not None and not before.resumed and not before.position:
            known = None  # another stream, of which nothing is known yet
        self.opened.known, self.opened.say = known, before.say
        super().expect(before)

    def _opened(self, number: int, position: int) -> Iterator[Any]:
        """Begin to read; a stream that counts its epochs by itself is first brought to this one."""
        opened = self.opened
        known, opened.known = opened.known, None
        shown = number if position else number - 1  # the epoch whose first batch is known
        if known is not None and (position or opened.epochs != number):
            before, (drawn, print_) = opened.epochs, self._first(shown)
            if self._differs(print_, known):
                for _ in range(before + 1, shown):
                    self._first(shown)
                drawn, print_ = self._first(shown)
                if self._differs(print_, known):
                    opened.say(
                        f"WARNING: the stream does not begin epoch {shown} as it did before the"
                        " checkpoint was saved, so some batches may come twice, and some not at"
                        " all: give its dataset set_epoch(epoch), and let what it reads depend on"
                        " that"
                    )
            if position:
                return drawn
        return self._first(number)[0]

    def _first(self, number: int) -> tuple[Iterator[Any], int]:
        """Begin to read an epoch, and describe its first batch."""
        self._tell(number)
        self._seed(number, -1)
        drawn = self._seeded(batch.begin(self.copy), number, 0)
        first = list(itertools.islice(drawn, 1))
        print_ = folded(0, [fingerprint(each) for each in first])
        self.opened.begin(number, print_)
        return itertools.chain(first, drawn), print_

    def _differs(self, print_: int, known: int) -> bool:
        """Tell, on all ranks alike, whether rank 0's stream begins with another batch."""
        return from_rank_0(print_ != known)

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

    def _together(self, drawn: Iterator[Any], start: int) -> Iterator[Micro]:
        """Go on until the last rank has no more; who has none shows its last one again."""
        before = None
        for data in itertools.islice(drawn, start):  # seen before a resume
            before = data
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
            yield micro_of(before)._replace(real=real)


class Opened:
    """Remembers of a stream: how often it was begun here, and with which batches."""

    def __init__(self) -> None:
        self.epochs = 0
        self.prints: dict[int, int] = {}  # by epoch, the last two
        self.known: int | None = None  # as a checkpoint has it
        self.say: Say = print

    def begin(self, number: int, print_: int) -> None:
        self.epochs += 1
        self.prints = {n: p for n, p in self.prints.items() if n == number - 1} | {number: print_}


def every(drawn: Iterator[Any], rank: int, world: int, position: int) -> Iterator[Any]:
    """Give a rank each batch of its turn, so that a round of all ranks begins at a position."""
    return itertools.islice(drawn, position % world + rank, None, world)


class Counted(NamedTuple):
    """A batch, and what is known of its samples; pin_memory knows a named tuple."""

    data: Any
    size: Size


class Counting:
    """A collate function that also counts the samples: no sampler knows those of a stream, or which
    of them are None, as a dataset marks what a collate is to leave out."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.copy = collate
        self.by_rows: bool | None = None  # the samples are the rows, if shapes leave that open

    def __call__(self, samples: list[Any]) -> Counted:
        size = sum(sample is not None for sample in samples)
        try:
            data = self.copy(samples)
        except (LookupError, TypeError) as error:
            if size:
                raise
            raise CheckFailed(
                f"of the {len(samples)} samples of a batch each is None, and collate_fn= makes"
                f" nothing of them: {type(error).__name__} {error}",
                "leave broken samples out of the dataset, or use larger batches",
            ) from error
        unclear = (is_unclear(part, size) for part in (data, *parts_in(data)))
        if size and self.by_rows is None and any(unclear):
            self.by_rows = self._ask(samples, data, size)
        return Counted(data, Size(size, self.by_rows))

    def _ask(self, samples: list[Any], data: Any, size: int) -> bool | None:
        """See what grows with one sample more. What the collate draws and counts is not changed."""
        more = [*samples, next(sample for sample in samples if sample is not None)]
        try:
            with randomness_kept():
                grown = copy.deepcopy(self.copy)(more)
        except Exception:  # noqa: BLE001 (code of a user's, which may want so many samples)
            return None
        if isinstance(data, (list, tuple)) and len(grown) == len(data) + 1:
            return False
        second = [shape[1] == size + 1 for shape in shapes_in(grown) if len(shape) > 1]
        return not (second and all(second))


def counting(loader: Any) -> dict[str, Any]:
    """Have a loader count what it puts together; a dataset that gives whole batches does that."""
    return {} if loader.batch_sampler is None else {"collate_fn": Counting(loader.collate_fn)}


def micro_of(data: Any) -> Micro:
    return Micro(data.data, None, size=data.size) if type(data) is Counted else Micro(data, None)


def fingerprint(data: Any) -> Any:
    """Describe a batch in few numbers, to be compared."""
    if isinstance(data, Tensor):
        return tuple(data.shape), data.double().sum().item()
    if isinstance(data, dict):
        return {str(key): fingerprint(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [fingerprint(value) for value in data]
    return ADDRESS.sub("", repr(data)[:200])
