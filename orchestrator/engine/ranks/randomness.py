"""Seeds all random generators of this process, and preserves those of the user's program."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def seed_all(*place: int, cpu_only: bool = False) -> None:
    """Seed all generators from a place in the training, so that a resume needs no saved state.

    A place is the seed of the config and some counters. The hash of ints is equal in all processes.
    """
    number = hash(place) & 0xFFFF_FFFF
    torch.default_generator.manual_seed(number)
    if not cpu_only:
        seed_devices()(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


@functools.cache
def seed_devices() -> Callable[[int], object]:
    """Return a function that seeds the accelerators of this process.

    torch.manual_seed also seeds absent kinds of devices, which costs 0.7 ms for each call.
    """
    if not torch.accelerator.is_available():
        return lambda number: None
    seed: Callable[[int], object] = getattr(
        torch.get_device_module(), "manual_seed_all", torch.manual_seed
    )
    return seed


@dataclass(frozen=True)
class Randomness:
    """The state of all global generators at one moment."""

    torch_state: Tensor
    # Of this rank's GPU, or None if CUDA is not initialised.
    cuda_state: Tensor | None
    python_state: Any
    # None if numpy is not imported.
    numpy_state: Any

    @classmethod
    def now(cls) -> Randomness:
        numpy = sys.modules.get("numpy")
        used = torch.cuda.is_initialized()
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if used else None,
            random.getstate(),
            numpy.random.get_state() if numpy else None,
        )

    def restore(self) -> None:
        torch.set_rng_state(self.torch_state)
        if self.cuda_state is not None:
            torch.cuda.set_rng_state(self.cuda_state)
        random.setstate(self.python_state)
        if self.numpy_state is not None:
            sys.modules["numpy"].random.set_state(self.numpy_state)


@contextlib.contextmanager
def randomness_kept() -> Iterator[None]:
    """Restore the user's random generators afterwards, as if nothing had been drawn."""
    before = Randomness.now()
    try:
        yield
    finally:
        before.restore()
