"""The order of the samples: one for all ranks, a new permutation for each epoch.

Nothing is stored: a permutation is computed for the places that are asked for, so that a billion
samples need no list, and a resume with any number of ranks needs one number, the position.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

ROUNDS = 6  # four make a Feistel network pseudorandom (Luby, Rackoff); small ones want a few more
HALF = 0xFFFF_FFFF


class Order:
    """Map positions to samples; positions count over all ranks, since the beginning."""

    def __init__(self, size: int, seed: int, *, shuffle: bool) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle

    def indices(self, position: int, count: int) -> list[int]:
        """Give the samples from a position on; epochs follow each other without a gap."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, first = divmod(position + len(indices), self.size)
            stop = min(self.size, first + count - len(indices))
            indices += self.of_epoch(epoch, range(first, stop))
        return indices

    def of_epoch(self, epoch: int, places: range) -> list[int]:
        """Give the samples at some places of one epoch."""
        if not self.shuffle:
            return list(places)
        at = torch.arange(places.start, places.stop, places.step)
        return permuted(at, self.size, keys(self.seed, epoch)).tolist()


@functools.lru_cache(maxsize=4)
def keys(seed: int, epoch: int) -> tuple[int, ...]:
    text = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4 * ROUNDS).digest()
    return tuple(int.from_bytes(text[i : i + 4], "little") for i in range(0, len(text), 4))


def permuted(places: Tensor, size: int, keys: tuple[int, ...]) -> Tensor:
    """Permute some positions within range(size). The network permutes the next power
    of two; what falls outside is sent on until it is inside, which takes less than two rounds."""
    bits = (size - 1).bit_length()
    places = feistel(places, bits, keys)
    while len(outside := (places >= size).nonzero()):
        places[outside] = feistel(places[outside], bits, keys)
    return places


def feistel(x: Tensor, bits: int, keys: tuple[int, ...]) -> Tensor:
    """Permute range(2**bits): the halves take turns in being changed by the other one."""
    low_bits = bits // 2
    low, high = x & ((1 << low_bits) - 1), x >> low_bits
    for number, key in enumerate(keys):
        if number % 2:
            low = low ^ (mixed(high, key) & ((1 << low_bits) - 1))
        else:
            high = high ^ (mixed(low, key) & ((1 << (bits - low_bits)) - 1))
    return high << low_bits | low


def mixed(x: Tensor, key: int) -> Tensor:
    """32 bits to 32 bits (the end of MurmurHash3); no product needs more than 63."""
    x = (x ^ key) & HALF
    x = ((x ^ x >> 16) * 0x45D9F3B) & HALF
    x = ((x ^ x >> 13) * 0x2C1B3C6D) & HALF
    return x ^ x >> 16
