"""Synthetic samples that can be learned, for trying things out without data.

Each is a function of its index alone: nothing is stored, and no seed changes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestrator.config.schema import Config, Model
from orchestrator.engine.data.sample_order import HALF, mixed

STRIDES = 4


def source(config: Config) -> Counting | Clicks:
    data = config.dataset
    if config.model.kind == "ranking":
        return Clicks(config.model, data.num_samples)
    return Counting(config.model.vocab_size, data.sequence_length, data.num_samples)


def scattered(x: Tensor, salt: int) -> Tensor:
    """Return 31 bits that look random for each number."""
    return mixed(mixed(x & HALF, salt) + (x >> 32), salt) >> 1


class Counting:
    """Counting in steps of 1 to 4, around the vocabulary: four guesses at first, one for a model
    that looks back at the token before."""

    def __init__(self, vocab_size: int, length: int, size: int) -> None:
        self.vocab_size, self.length, self.size = vocab_size, length, size

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int], position: int) -> dict[str, Tensor]:
        index = torch.tensor(indices)
        first, stride = scattered(index, 1), 1 + scattered(index, 2) % STRIDES
        rows = first[:, None] + stride[:, None] * torch.arange(self.length + 1)
        rows %= self.vocab_size
        return {"inputs": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


class Clicks:
    """Features of a user and an item, and whether a fixed linear rule of them is positive."""

    def __init__(self, model: Model, size: int) -> None:
        self.model, self.size = model, size

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int], position: int) -> dict[str, Tensor]:
        model, index = self.model, torch.tensor(indices)[:, None]
        numbers = model.num_dense_features * model.dense_dim
        sparse = scattered(index * model.sparse_features + torch.arange(model.sparse_features), 3)
        sparse %= model.vocab_size
        dense = between(scattered(index * numbers + torch.arange(numbers), 4))
        places = torch.arange(model.sparse_features) * model.vocab_size + sparse
        # Each part of the rule counts about as much as the other.
        score = between(scattered(places, 5)).mean(1) * model.sparse_features**0.5
        score += (dense * between(scattered(torch.arange(numbers), 6))).mean(1) * numbers**0.5
        shape = (len(indices), model.num_dense_features, model.dense_dim)
        return {"sparse": sparse, "dense": dense.view(shape), "label": (score > 0).float()}


def between(x: Tensor) -> Tensor:
    """Map 31 bits to numbers from -sqrt(3) to sqrt(3), whose variance is 1."""
    return ((x / 2.0**30 - 1.0) * 3**0.5).float()
