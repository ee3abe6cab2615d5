"""Batches as the training loop sees them, and their way to the device."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from orchestrator.common.text import Say
from orchestrator.engine.models.nested import map_nested
from orchestrator.engine.ranks.ranks import Ranks


class Micro(NamedTuple):
    """One micro-batch of this rank."""

    data: Any
    # The numbers of its samples, if they have any.
    ids: list[int] | None
    # False for a stand-in that is not counted: this rank only takes part in the collectives.
    real: bool = True
    # The number of its samples, if known.
    drawn: int | None = None


class TrainingPlace(Protocol):
    """The epoch and position that a training has reached."""

    epoch: int
    position: int


class Batches:
    """The loop's view of data. All ranks get equally many batches of an epoch."""

    # A part of the first line that a training prints.
    description: str
    # Samples of a rank in each batch, if known.
    batch_size: int | None = None
    # Samples of all ranks in an epoch, if known.
    samples: int | None = None
    # True if epochs follow each other without a gap, as if there were only one.
    endless = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @property
    def round_size(self) -> int:
        """Return by how much one batch on every rank advances the position."""
        return self.ranks.world * (self.batch_size or 1)

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        """Return the batches of an epoch from a position on. Positions count over all ranks."""
        raise NotImplementedError

    def record(self, epoch: int, position: int) -> dict[str, Any]:
        """Describe the order of the samples for a checkpoint. Every rank has to call it."""
        return {}

    def expect(
        self, saved: Mapping[str, Any], place: TrainingPlace, say: Say, *, resumed: bool
    ) -> None:
        """Continue from a result of record(), or raise CheckFailed. Every rank has to call it.

        `resumed` is True for a checkpoint or a state in memory, False within one process.
        """


class DataPlace:
    """Records in checkpoints which samples of the training data come next."""

    def __init__(self) -> None:
        self.training: Batches | None = None
        self.state: TrainingPlace | None = None
        self.loaded: Mapping[str, Any] = {}

    def begin(self, training: Batches, state: TrainingPlace, say: Say) -> None:
        """Continue from the loaded state, or from the end of this process's last training."""
        saved = self.loaded or self.state_dict()
        training.expect(saved, state, say, resumed=bool(self.loaded))
        self.training, self.state, self.loaded = training, state, {}

    def state_dict(self) -> dict[str, Any]:
        if self.training is None or self.state is None:
            return {}
        return self.training.record(self.state.epoch, self.state.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state


class BatchStream:
    """An iterator over batches with a check for its end.

    It draws a batch as late as possible, because a sampler may learn from each step.
    """

    def __init__(self, batches: Iterator[Micro]) -> None:
        self.batches = batches
        self.ahead: list[Micro | None] = []

    def next(self) -> Micro | None:
        return self.ahead.pop() if self.ahead else next(self.batches, None)

    def over(self) -> bool:
        self.ahead = self.ahead or [next(self.batches, None)]
        return self.ahead[0] is None


def to_device(data: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device. A user's own classes are kept."""

    def move(value: Any) -> Any:
        asynchronous = {"non_blocking": True} if isinstance(value, Tensor) else {}
        return value.to(device, **asynchronous)

    # A PackedSequence, a BatchEncoding and a graph have a method to() of their own.
    return map_nested(data, move, lambda value: callable(getattr(value, "to", None)))


def ignore_signals(user_init: Callable[[int], Any] | None, worker: int) -> None:
    """Initialise a DataLoader worker. It ignores signals to the group: its rank ends it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if user_init is not None:
        user_init(worker)
