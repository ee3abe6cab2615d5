"""Takes what a program's own sampler draws, when its loader asks, and the same after a resume.

A sampler may draw by a generator of its own, keep a state, or learn from each step. So what it drew
is remembered as a number, and compared where a resume draws it again.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler

from orchestrator.common.errors import CheckFailed
from orchestrator.common.text import Say
from orchestrator.engine.data.batch import Batches, Before
from orchestrator.engine.ranks.randomness import Randomness, randomness_kept, seed_all
from orchestrator.engine.ranks.ranks import Ranks, from_rank_0, gather


class Place(Protocol):
    """Where a training is."""

    epoch: int
    position: int


EPOCHS = 1 << 40  # beyond any step, whose seeds are others
PLAIN = (bool, int, float, str)
DRAWN_AT_ONCE = 1 << 14  # where nobody can see whether it was sooner
PRIME, FACTOR = (1 << 61) - 1, 0x9E37_79B9_7F4A_7C15
FIX = (
    "give it state_dict() and load_state_dict(), which are called where an epoch begins; or let"
    " what it draws depend on set_epoch(epoch), or on torch's, Python's or numpy's global random"
    " numbers, which are seeded for each epoch"
)
WITHIN = (
    "its draw depends on what happens within an epoch; save at the end of epochs:"
    ' save_every="1 epoch"'
)


# -- a number for what was drawn ------------------------------------------------------------------


def folded(print_: int, items: Iterable[Any]) -> int:
    """Return the number of all that was drawn, with some more at its end."""
    for item in items:
        value = item if type(item) is int else number_of(item)
        print_ = (print_ * FACTOR + 2 * value + 1) % PRIME
    return print_


def number_of(item: Any) -> int:
    """Return a number for a draw, the same in each process: a sample, or a batch of them."""
    if isinstance(item, (list, tuple)):
        return folded(len(item), item)
    with contextlib.suppress(TypeError, RuntimeError, ValueError):
        return operator.index(item)
    if isinstance(item, dict):
        return folded(len(item), item.items())
    if callable(listed := getattr(item, "tolist", None)):  # an array, or a tensor
        return number_of(listed())
    plain = item is None or isinstance(item, (str, bytes, float, complex))
    text = repr(item) if plain else type(item).__name__  # another's repr may hold an address
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


# -- one epoch ------------------------------------------------------------------------------------


class Epoch:
    """The draws of one epoch, whose random numbers depend on the epoch alone."""

    def __init__(self, source: Any, seed: int, number: int, rank: int = 0) -> None:
        self.source = source
        self.count = self.print = 0  # of what was drawn
        self.latest: list[Any] = []  # the last that was passed over
        self.ahead: list[Any] = []  # drawn already
        self.drawn: Iterator[Any] | None = None
        sampler = inner(source)
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(number)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed + number)
        with randomness_kept():
            seed_all(seed, EPOCHS + number, 0, rank)
            self.own = Randomness.now()

    def take(self, many: int) -> list[Any]:
        """Give so many more, or what is left."""
        given, self.ahead = self.ahead[:many], self.ahead[many:]
        return given if len(given) == many else given + self._draw(many - len(given))

    def _draw(self, many: int) -> list[Any]:
        with randomness_kept():
            self.own.restore()
            self.drawn = self.drawn or iter(self.source)
            items = list(itertools.islice(self.drawn, many))
            self.own = Randomness.now()
        self.count, self.print = self.count + len(items), folded(self.print, items)
        return items

    def pass_over(self, many: int | None = None) -> Epoch:
        """Draw so many, or all, and keep their number alone."""
        while many is None or self.count < many:
            left = DRAWN_AT_ONCE if many is None else many - self.count
            items = self._draw(min(left, DRAWN_AT_ONCE))
            self.latest = items[-1:] or self.latest
            if not items:
                break
        return self

    def draw_ahead(self, many: int) -> Epoch:
        """Draw as many as were drawn before a save, some of which nobody had seen yet."""
        self.ahead += self._draw(max(0, many - self.count))
        return self


def inner(source: Any) -> Any:
    """Return the sampler that a BatchSampler of torch's only asks."""
    return source.sampler if type(source) is BatchSampler else source


# -- all epochs -----------------------------------------------------------------------------------


class Draws:
    """The draws of one sampler in all epochs, here and in the life of the training before.

    `moves`: how far each draw moves the position, where every rank draws its own part; else rank 0
    draws for all. `repeats`: what it draws depends on the epoch's number alone.
    """

    def __init__(
        self, source: Any, ranks: Ranks, seed: int, *, moves: int = 0, repeats: bool = False
    ) -> None:
        self.source, self.ranks, self.seed = source, ranks, seed
        self.each, self.moves = bool(moves), moves or 1
        self.sampler = inner(source)
        self.name = type(self.sampler).__name__
        self.repeats = repeats or callable(getattr(self.sampler, "set_epoch", None))
        self.stateful = all(
            callable(getattr(self.sampler, name, None))
            for name in ("state_dict", "load_state_dict")
        )
        self.itself = {  # tells it from others
            "by": self.name,
            "length": length_of(self.sampler),
            "ranks": ranks.world if self.each else None,
        }
        self.draws = self.each or ranks.rank == 0
        self.begun = 0  # epochs that it has drawn here, the one that is under way among them
        self.since = 0  # the first epoch that it drew
        self.before: dict[int, int] = {}  # for an epoch: the number of all before it
        self.last: dict[int, int] = {}  # for an epoch: that of the one before it
        self.epoch: Epoch | None = None  # the one that is under way
        self.state: Any = None  # what state_dict() gave when it began
        self.expected: Mapping[str, Any] = {}
        self.say: Say | None = None  # of a training; an evaluation just draws
        self.twin: Any = None  # the sampler as it was when the epoch began
        self.drawn_again = False  # that twin, once

    # -- what a checkpoint has of them -----------------------------------------------------------

    def record(self, epoch: int, position: int) -> dict[str, Any]:
        """Describe what was drawn up to a position, as a checkpoint keeps it. All ranks call it."""
        within = self.epoch if position and self.begun == epoch + 1 else None
        state = self.state if position else self._state()
        return from_rank_0(
            {
                **self.itself,
                "since": self.since,
                "before": self.before.get(epoch),
                "last": self.last.get(epoch),
                "drawn": within and within.count,
                "print": within and within.print,
                "attributes": attributes_of(self.sampler),
                "state": state,
            }
        )

    def _state(self) -> Any:
        """Return its state, or those of all ranks where each draws."""
        if not self.stateful or not self.draws:
            return None
        state = copy.deepcopy(self.sampler.state_dict())
        return gather(state) if self.each else state

    def expect(self, before: Before, drew: Draws | None) -> None:
        """Go on from what was saved; say, or refuse, if it was another sampler's."""
        self.say = before.say
        saved, epoch, position = before.saved, before.epoch, before.position
        if drew is not None and drew.sampler is self.sampler:
            for name in ("itself", "begun", "since", "before", "last"):
                setattr(self, name, getattr(drew, name))
        elif before.by is not None and not before.resumed and not position:
            self._set_out(epoch)
            return
        changed = {key for key, value in self.itself.items() if saved.get(key) != value}
        others = "ranks" in changed and changed <= {"ranks", "length"}  # it is said elsewhere
        if not saved or not changed or others:
            self.expected, self.since = {} if others else saved, saved.get("since", 0)
            return
        then, here = described(saved), described(self.itself)
        if position:
            raise CheckFailed(
                f"the checkpoint was saved within epoch {epoch}, which {then} had drawn: nobody"
                f" knows what of it is left for {here}",
                "resume with the same sampler, or from the end of an epoch",
            )
        before.say(f"the epochs before were drawn by {then}, those from now on by {here}")
        self._set_out(epoch)

    def _set_out(self, epoch: int) -> None:
        """Take this epoch for the first that the sampler draws."""
        self.begun = self.since = epoch
        self.before, self.last = {}, {}

    # -- drawing ---------------------------------------------------------------------------------

    def begin(self, number: int, position: int) -> Epoch | None:
        """Begin an epoch and draw what comes before a position, as it was drawn before.

        All ranks call it; the result is None where rank 0 draws for this one.
        """
        saved, self.expected = self.expected, {}
        if (state := saved.get("state")) is not None and self.stateful:
            mine = state[self.ranks.rank] if self.each else state
            self.sampler.load_state_dict(copy.deepcopy(mine))
        self.state, self.epoch, problem = self._state(), None, None
        if self.draws:
            try:
                self.epoch = self._drawn(saved, number, position // self.moves)
            except CheckFailed as error:
                problem = (error.what, error.fix)
        if problem := from_rank_0(problem):
            raise CheckFailed(*problem)
        self.begun = number + 1
        return self.epoch

    def _drawn(self, saved: Mapping[str, Any], number: int, passed: int) -> Epoch:
        alone = self.repeats or saved.get("state") is not None
        if self.say is not None and not alone and self.begun > number and not passed:
            raise self._other(number, FIX)
        self.before.setdefault(self.since, 0)
        for before in (
            () if alone or self.say is None else range(max(self.begun, self.since), number)
        ):
            self._end(before, self._epoch(before).pass_over())
        compared = {} if alone else {"before": self.before.get(number)}
        if self.repeats and not passed and self.begun != number > self.since:
            compared["last"] = self._epoch(number - 1).pass_over().print
        self._compare(saved, compared, number - 1, FIX)
        for kept, key in ((self.before, "before"), (self.last, "last")):
            if saved.get(key) is not None:
                kept[number] = saved[key]
        if self.say is not None and not self.repeats and not self.drawn_again:
            self.twin = twin_of(self.source)
        if not passed:
            self._say_changed(saved)
        drawn = self._epoch(number).pass_over(passed).draw_ahead(saved.get("drawn") or 0)
        fix = FIX if saved.get("state") is None else WITHIN
        self._compare(saved, {"print": drawn.print}, number, fix)
        if passed:
            self._say_changed(saved)
        return drawn

    def end(self) -> None:
        """Note that the epoch that is under way has no more."""
        if self.epoch is not None:
            self._end(self.begun - 1, self.epoch)

    def _end(self, number: int, epoch: Epoch) -> None:
        before = self.before.get(number)
        self.last = {number: self.last.get(number, 0), number + 1: epoch.print}
        self.before = {} if before is None else {
            number: before, number + 1: folded(before, [epoch.print])}  # fmt: skip

    def _epoch(self, number: int, source: Any = None) -> Epoch:
        rank = self.ranks.rank if self.each else 0
        return Epoch(self.source if source is None else source, self.seed, number, rank)

    # -- whether it is the same ------------------------------------------------------------------

    def _compare(
        self, saved: Mapping[str, Any], drawn: Mapping[str, int | None], epoch: int, fix: str
    ) -> None:
        """Refuse to go on, on rank 0, whose draws are those that were saved."""
        pairs = ((saved.get(key), value) for key, value in drawn.items())
        if not self.ranks.rank and any(None not in pair and pair[0] != pair[1] for pair in pairs):
            raise self._other(epoch, fix)

    def _other(self, epoch: int, fix: str) -> CheckFailed:
        return CheckFailed(
            f"{self.name} does not draw in epoch {epoch} what it drew there before the checkpoint"
            " was saved, so other samples would be left out",
            fix,
        )

    def _say_changed(self, saved: Mapping[str, Any]) -> None:
        """Name what has another value after the same draws: they may depend on it from here on."""
        before: Mapping[str, int] = saved.get("attributes") or {}
        names = [
            name
            for name, value in before.items()
            if number_of(summary(getattr(self.sampler, name, None))) != value
        ]
        if names and self.say is not None and not self.ranks.rank:
            self.say(
                f"WARNING: {', '.join(names)} of {self.name} is not what it was when it was saved,"
                f" and what it draws may depend on it; {FIX}"
            )

    def unrepeatable(self, epoch: int, position: int) -> str:
        """Say, at the first save within an epoch, if its draw is another when it is drawn again."""
        drawn, twin = self.epoch, self.twin
        if twin is None or drawn is None or not position or self.begun != epoch + 1:
            return ""
        self.twin, self.drawn_again = None, True
        try:
            again = self._epoch(epoch, twin).pass_over(drawn.count)
        except Exception:  # noqa: BLE001 (a copy of a user's object, on which nothing depends)
            return ""
        if again.print == drawn.print:
            return ""
        return (
            "WARNING: a resume will refuse what is saved within an epoch:"
            f" {self.name} does not draw again what it drew; {WITHIN}"
        )


class Asked:
    """Gives a DataLoader what a rank's own sampler draws, one by one, and notes it."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.drawn: Epoch | None = None
        self.shown: list[Any] = []

    def begin(self, number: int, position: int, *, latest: bool = False) -> int:
        """Begin at a position, or `latest`: at the draw before it; return how many are left out."""
        self.drawn = self.draws.begin(number, position)
        assert self.drawn is not None
        self.shown = self.drawn.latest if latest else []
        return position // self.draws.moves - len(self.shown)

    def __iter__(self) -> Iterator[Any]:
        assert self.drawn is not None
        yield from self.shown
        while items := self.drawn.take(1):
            yield items[0]
        self.draws.end()


def length_of(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def attributes_of(sampler: Any) -> dict[str, int]:
    """Describe the plain values that a sampler holds, but for long lists."""
    return {
        name: number_of(summary(value))
        for name, value in vars_of(sampler).items()
        if isinstance(value, PLAIN) or hasattr(value, "shape")
    }


def summary(value: Any) -> Any:
    """Describe an array, or a tensor, in few numbers."""
    shape = getattr(value, "shape", None)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of texts, or of objects
        return value if shape is None else ([*shape], float(value.sum()))
    return repr(shape)


def described(saved: Mapping[str, Any]) -> str:
    length = saved.get("length")
    return f"{saved.get('by')}" + ("" if length is None else f" of {length:,}")


def twin_of(source: Any) -> Any:
    """Copy a sampler, but for its dataset; None where that cannot be done."""
    held = [*vars_of(source).items(), *vars_of(inner(source)).items()]
    shared = [value for name, value in held if name in ("data_source", "dataset")]
    try:
        return copy.deepcopy(source, {id(each): each for each in shared})
    except Exception:  # noqa: BLE001 (whatever a user's object holds)
        return None


def vars_of(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


class Drawn:
    """Describes what a checkpoint keeps of the draws of a training."""

    def __init__(self) -> None:
        self.training: Batches | None = None
        self.state: Place | None = None
        self.loaded: Mapping[str, Any] = {}

    def begin(self, training: Batches, state: Place, say: Say) -> None:
        """Have the draws go on from what was loaded, or from those before in this process."""
        saved, resumed = self.loaded or self.state_dict(), bool(self.loaded)
        training.expect(Before(saved, state.epoch, state.position, self.training, resumed, say))
        self.training, self.state, self.loaded = training, state, {}

    def state_dict(self) -> dict[str, Any]:
        if self.training is None or self.state is None:
            return {}
        return self.training.record(self.state.epoch, self.state.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state
