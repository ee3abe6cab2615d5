"""The global random numbers of this process: torch's, Python's and numpy's."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Randomness:
    """The state of all global generators at one moment."""

    torch_state: Tensor
    cuda_state: Tensor | None  # of this rank's GPU, if it is in use
    python_state: Any
    numpy_state: Any  # if numpy is imported

    @classmethod
    def now(cls) -> Randomness:
        numpy = sys.modules.get("numpy")
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
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
    """Leave the user's random numbers as if nothing had been drawn or seeded in between."""
    before = Randomness.now()
    try:
        yield
    finally:
        before.restore()
