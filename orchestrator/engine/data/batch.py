"""Bring a batch to the model: what the loop knows of it, and its device."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from orchestrator.common.text import Say
from orchestrator.engine.models.nested import mapped
from orchestrator.engine.ranks.ranks import Ranks


class Micro(NamedTuple):
    """One micro-batch of this rank."""

    data: Any
    # Its samples, where they have numbers.
    ids: list[int] | None
    # False: it counts as none, and this rank only takes part in the collectives.
    real: bool = True
    # How many samples it was made of, where that is known.
    drawn: int | None = None


class TrainingPlace(Protocol):
    """Where a training is."""

    epoch: int
    position: int


class Batches:
    """The loop's view of data: every rank gets as many batches of an epoch as the others."""

    # Said in the first line of a training.
    description: str
    # Samples of a rank in each batch, where that is known.
    batch_size: int | None = None
    # Samples of all ranks in an epoch, where that is known.
    samples: int | None = None
    # Epochs follow each other without a gap, as if there were only one.
    endless = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @property
    def round_size(self) -> int:
        """Return how far one batch on every rank moves the position."""
        return self.ranks.world * (self.batch_size or 1)

    def epoch(self, number: int, position: int = 0) -> Iterator[Micro]:
        """Return the batches of an epoch from a position on; positions count over all ranks."""
        raise NotImplementedError

    def record(self, epoch: int, position: int) -> dict[str, Any]:
        """Describe the order of the samples, so that a resume can compare it. All ranks call it."""
        return {}

    def expect(
        self, saved: Mapping[str, Any], place: TrainingPlace, say: Say, *, resumed: bool
    ) -> None:
        """Go on from a result of record(), or raise if that cannot be. All ranks call it.

        `resumed`: from a checkpoint or a state in memory, not in the same process.
        """


class DataPlace:
    """Keeps for checkpoints which samples of the training's data come next."""

    def __init__(self) -> None:
        self.training: Batches | None = None
        self.state: TrainingPlace | None = None
        self.loaded: Mapping[str, Any] = {}

    def begin(self, training: Batches, state: TrainingPlace, say: Say) -> None:
        """Go on from what was loaded, or from where the training before in this process ended."""
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
    """Batches, one after the other.

    Whether one more comes is asked as late as it can be: a sampler may learn from each step.
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
    """Move the tensors of a batch; what a user's dataset makes of them keeps its class."""

    def move(value: Any) -> Any:
        asynchronous = {"non_blocking": True} if isinstance(value, Tensor) else {}
        return value.to(device, **asynchronous)

    # A PackedSequence, a BatchEncoding and a graph have a method for it.
    return mapped(data, move, lambda value: callable(getattr(value, "to", None)))


def ignore_signals(user_init: Callable[[int], Any] | None, worker: int) -> None:
    """Begin a worker of a DataLoader: a signal to the whole group ends ranks, which end workers."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if user_init is not None:
        user_init(worker)
