"""The samples of each rank in each round. A round is one batch on every rank.

`OurOrder` divides an order that is known from the start. `OwnOrder` draws from a user's sampler or
stream, which alone knows the order.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.common.errors import CheckFailed
from orchestrator.common.text import Say
from orchestrator.engine.data.batch import TrainingPlace
from orchestrator.engine.models.nested import map_nested
from orchestrator.engine.ranks.randomness import randomness_kept, seed_all
from orchestrator.engine.ranks.ranks import Ranks, from_rank_0, gather_values, host_group

# More than any number of a step, so that the seeds of epochs and steps differ.
EPOCHS = 1 << 40
# The number of places whose samples are computed at a time.
PLACES_AT_ONCE = 1 << 11
# Matches the address of an object, which differs between processes.
ADDRESS = re.compile(r"\b0x[0-9a-f]+")
LONGEST_PRINT = 2000


class Round(NamedTuple):
    """One batch of this rank: its samples, or one item that is a whole batch."""

    items: list[Any]
    # False if nothing is left for this rank, and the items only stand in for its batch.
    real: bool


class Order:
    """Maps positions to samples. Positions count over all ranks, since the start of the training.

    It depends on the seed and the epoch alone, so a resume with any number of ranks needs one
    number, the position. A shuffled order takes 8 bytes for each sample.
    """

    def __init__(self, size: int, seed: int, *, shuffle: bool) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.epoch, self.permutation = -1, torch.empty(0)

    def indices(self, position: int, count: int) -> list[int]:
        """Return `count` samples from a position on. Epochs follow each other without a gap."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, first = divmod(position + len(indices), self.size)
            stop = min(self.size, first + count - len(indices))
            indices += self.of_epoch(epoch, range(first, stop))
        return indices

    def of_epoch(self, epoch: int, places: range) -> list[int]:
        """Return the samples at some places of one epoch."""
        if not self.shuffle:
            return list(places)
        at = self._permutation(epoch)[places.start : places.stop : places.step]
        samples: list[int] = at.tolist()
        return samples

    def _permutation(self, epoch: int) -> Tensor:
        if epoch != self.epoch:
            # The hash of a tuple of numbers is the same in every process.
            own = torch.Generator().manual_seed(hash((self.seed, epoch)) & 0xFFFF_FFFF_FFFF_FFFF)
            self.epoch, self.permutation = epoch, torch.randperm(self.size, generator=own)
        return self.permutation


class OurOrder:
    """Divides each epoch: the n-th batches of all ranks are the n-th of a single process."""

    def __init__(
        self,
        size: int,
        seed: int,
        ranks: Ranks,
        *,
        shuffle: bool,
        batch_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        self.order = Order(size, seed, shuffle=shuffle)
        self.size, self.ranks, self.drop_last = size, ranks, drop_last
        self.batch_size = batch_size
        how = f"shuffled by seed {seed} and epoch" if shuffle else "in their order"
        self.description = f"{size:,} samples, {how}"

    def end(self, position: int) -> int:
        """Return the end of an epoch that starts at a position."""
        if not self.drop_last:
            return self.size
        at_once = self.batch_size * self.ranks.world
        return position + (self.size - position) // at_once * at_once

    def rounds(self, epoch: int, position: int) -> Iterator[Round]:
        """Yield this rank's rounds from a position on. All ranks get equally many."""
        size, world, end = self.batch_size, self.ranks.world, self.end(position)
        many = max(1, PLACES_AT_ONCE // size)
        for start in range(position, end, many * size * world):
            stop = min(start + many * size * world, end)
            items = self.order.of_epoch(epoch, range(start + self.ranks.rank, stop, world))
            for first in range(0, -(-(stop - start) // world), size):
                share = items[first : first + size]
                yield Round(share or self.order.of_epoch(epoch, range(1)), bool(share))

    def reached(self, epoch: int, position: int) -> None:
        """Return at once: a known order has no state to drop."""

    def record(self, epoch: int, position: int) -> dict[str, Any]:
        return {"by": self.description}

    def expect(
        self, saved: Mapping[str, Any], place: TrainingPlace, say: Say, *, resumed: bool
    ) -> None:
        if place.position and saved.get("by", self.description) != self.description:
            say(
                f"WARNING: epoch {place.epoch} was begun with {saved['by']}, and goes on with"
                f" {self.description}: some samples may come twice in it, and some not at all"
            )


class OwnOrder:
    """Draws rounds from a user's sampler, batch sampler or stream, and resumes its place.

    The state_dict() of an object, if it has one with load_state_dict(), holds its place within the
    epoch. Any other object is fast-forwarded: the epoch starts with the same seeds, and the samples
    before the position are dropped.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        holder: Any,
        name: str,
        ranks: Ranks,
        seed: int,
        *,
        batch_size: int | None,
        each: bool,
        drop_last: bool = False,
        is_sampler: bool = False,
    ) -> None:
        """With `each`, every rank draws its own part. Otherwise all ranks draw the same.

        Draws of a sampler are then taken from rank 0.
        """
        self.begin, self.holder, self.ranks, self.seed = begin, holder, ranks, seed
        self.each, self.drop_last = each, drop_last
        self.from_first = is_sampler and not each
        self.compared = each or ranks.world == 1
        self.size = (batch_size or 1) if is_sampler else 1
        self.share = self.size * (1 if each else ranks.world)
        self.has_state = all(hasattr(holder, name) for name in ("state_dict", "load_state_dict"))
        # A resume has to match this name.
        self.name = name if self.has_state and not each else f"{name} on {ranks.world} ranks"
        if batch_size is not None and not self.has_state:
            self.name += f" in batches of {batch_size}"
        # A sampler without set_epoch() may depend on what it drew in earlier epochs.
        self.goes_on = is_sampler and not self.has_state and not hasattr(holder, "set_epoch")
        self.missed = 0
        self.loaded: Any = None
        self.states: dict[tuple[int, int], Any] = {}

    # -- drawing ---------------------------------------------------------------------------------

    def rounds(self, epoch: int, position: int) -> Iterator[Round]:
        """Yield this rank's rounds from a position on. All ranks get equally many."""
        drawn = self._resumed(epoch, position)
        shown: list[Any] = []
        while True:
            # The DataLoader draws ahead of the training, so each position keeps its own state.
            self.states[epoch, position] = self._state()
            items = self._take(drawn, epoch, position)
            share = items if self.each else items[self.ranks.rank :: self.ranks.world]
            shown = share or shown or items[:1]
            have, can_show = self._ranks_with(share, shown)
            if not have:
                return
            if can_show < self.ranks.world:
                raise CheckFailed(
                    "the stream has fewer batches than there are ranks, and some got none",
                    "use fewer ranks, or smaller batches",
                )
            yield Round(shown, bool(share))
            position += self.size * self.ranks.world

    def reached(self, epoch: int, position: int) -> None:
        """Drop the states before a position, which no save will need."""
        self.states = {place: s for place, s in self.states.items() if place >= (epoch, position)}

    def _resumed(self, epoch: int, position: int) -> Iterator[Any]:
        self.states, missed, self.missed = {}, self.missed, 0
        for earlier in range(missed):
            drawn, at = self._begun(earlier), 0
            while self._draw(drawn, earlier, at):
                at += self.size * self.ranks.world
        if self.loaded is not None:
            self.holder.load_state_dict(self.loaded)
            self.loaded = None
            return self._begun(epoch)
        drawn = self._begun(epoch)
        for at in range(0, position, self.size * self.ranks.world):
            self._draw(drawn, epoch, at)
        return drawn

    def _begun(self, epoch: int) -> Iterator[Any]:
        with randomness_kept():
            self._seed(epoch, -1)
            return self.begin()

    def _draw(self, drawn: Iterator[Any], epoch: int, position: int) -> list[Any]:
        with randomness_kept():
            self._seed(epoch, position)
            return list(itertools.islice(drawn, self.share))

    def _take(self, drawn: Iterator[Any], epoch: int, position: int) -> list[Any]:
        items = self._draw(drawn, epoch, position)
        if not self.compared:
            refuse_other_draws(items)
            self.compared = True
        items = from_rank_0(items) if self.from_first else items
        return [] if self.drop_last and len(items) < self.share else items

    def _seed(self, epoch: int, position: int) -> None:
        # Ranks that draw the same samples need the same random numbers.
        rank = self.ranks.rank if self.each else 0
        seed_all(self.seed, EPOCHS + epoch, position + 1, rank)

    def _ranks_with(self, share: list[Any], shown: list[Any]) -> tuple[int, int]:
        """Return how many ranks have a share, and how many have items or a stand-in."""
        counts = torch.tensor([bool(share), bool(shown)]).int()
        if self.ranks.world > 1:
            dist.all_reduce(counts, group=host_group())
        return int(counts[0]), int(counts[1])

    # -- state in a checkpoint -------------------------------------------------------------------

    def _state(self) -> Any:
        return copy.deepcopy(self.holder.state_dict()) if self.has_state else None

    def record(self, epoch: int, position: int) -> dict[str, Any]:
        place = epoch, position
        state = self.states[place] if place in self.states else self._state()
        if self.has_state and self.ranks.world > 1:
            state = gather_values(state) if self.each else from_rank_0(state)
        elif self.each:
            state = [state]
        return {"by": self.name, "state": state}

    def expect(
        self, saved: Mapping[str, Any], place: TrainingPlace, say: Say, *, resumed: bool
    ) -> None:
        fits = saved.get("by") == self.name
        if saved and place.position and not fits:
            raise CheckFailed(
                f"the checkpoint was saved within epoch {place.epoch}, whose samples were drawn by"
                f" {saved.get('by')}; what is left of them is not known to {self.name}",
                'save at the end of epochs (save_every="1 epoch"), resume on as many ranks with'
                " the same batch size, give it state_dict() and load_state_dict(), or leave the"
                " order to the Trainer (a DataLoader without a sampler of your own)",
            )
        self.missed = place.epoch if self.goes_on and resumed else 0
        if fits and self.has_state and (resumed or place.position):
            state = saved["state"]
            self.loaded = state[self.ranks.rank] if self.each else state


def refuse_other_draws(items: list[Any]) -> None:
    """Raise CheckFailed if the first draws differ between ranks."""
    prints = gather_values(ADDRESS.sub("", repr(map_nested(items, print_of)))[:LONGEST_PRINT])
    if any(other != prints[0] for other in prints):
        raise CheckFailed(
            "the ranks draw different samples, so dealing out those of rank 0 would lose the rest",
            'pass stream="own" if the data give every rank its own part; otherwise make their order'
            " depend on what is equal everywhere",
        )


def print_of(tensor: Tensor) -> tuple[list[int], float]:
    return [*tensor.shape], tensor.double().sum().item()
