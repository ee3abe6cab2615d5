"""The order of the samples: one for all ranks, a new permutation for each epoch.

It depends on the seed and the epoch alone, so a resume with any number of ranks needs one number,
the position. A shuffled order takes 8 bytes for each sample.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Order:
    """Maps positions to samples; positions count over all ranks, since the beginning."""

    def __init__(self, size: int, seed: int, *, shuffle: bool) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.epoch, self.permutation = -1, torch.empty(0)

    def indices(self, position: int, count: int) -> list[int]:
        """Return the samples from a position on; epochs follow each other without a gap."""
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
