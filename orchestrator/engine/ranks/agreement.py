"""Check that values are equal on all ranks, by one hash of each.

The values stay where they are: a rank sends hashes of 8 bytes, whatever the number of ranks. Names
are compared, or weights sent, only where hashes differ.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.ranks.ranks import from_rank_0, gather, host_group

NUMBERS_AT_ONCE = 1 << 20  # numbers that are hashed at a time: they stay in the cache
BETWEEN_PIECES = 0x9E3779B97F4A7C15 - (1 << 64)
FIX = "make the same model everywhere; torch's seed is set before a model.target is made"


def take_weights_of_first(model: nn.Module) -> None:
    """Copy rank 0's weights to all: users make their model in every rank, each with its own.

    Weights that are equal already, as after a common seed or file, are not sent.
    """
    take_values_of_first(tensors(model))


def take_buffers_of_first(model: nn.Module) -> None:
    """Copy rank 0's buffers to all: each has the running statistics of its own batches, and one
    model is to be evaluated and saved, not as many as there are ranks."""
    kept = model.state_dict().keys()  # others may have another size on each rank
    take_values_of_first([(name, value) for name, value in model.named_buffers() if name in kept])


def take_values_of_first(values: Sequence[tuple[str, Tensor]]) -> None:
    refuse_other_shapes(values)
    for (_, value), equal in zip(values, are_equal(values), strict=True):
        if not equal:
            first = value.data.contiguous()
            dist.broadcast(first, 0, group=host_group() if first.device.type == "cpu" else None)
            value.data.copy_(first)


def refuse_differences(model: nn.Module) -> None:
    """Refuse a model whose function drew other weights on some ranks; sharding would mix them."""
    values = [(name, value.detach()) for name, value in model.named_parameters()]
    refuse_other_shapes(values)
    for (name, _), equal in zip(values, are_equal(values), strict=True):
        if not equal:
            raise CheckFailed(
                f"the model is not the same on all ranks: {name} has other values on some", FIX
            )


def tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def refuse_other_shapes(values: Sequence[tuple[str, Tensor]]) -> None:
    described = [(name, tuple(value.shape), str(value.dtype)) for name, value in values]
    digest = hashlib.blake2b(repr(described).encode(), digest_size=8).digest()
    number = torch.tensor([int.from_bytes(digest, "little", signed=True)])
    if same(number).all():
        return
    first = from_rank_0(described)
    missing = [entry for entry in first if entry not in described]
    extra = [entry for entry in described if entry not in first]
    problem = ""
    if described != first:
        problem = f"rank {dist.get_rank()} lacks {missing[:1]} of rank 0, and has {extra[:1]}"
    problems = [text for text in gather(problem) if text]
    raise CheckFailed(f"the model is not the same on all ranks: {problems[0]}", FIX)


def are_equal(values: Sequence[tuple[str, Tensor]]) -> list[bool]:
    """Tell for each tensor whether all ranks have the same bits in it."""
    if dist.get_world_size() == 1 or not values:
        return [True] * len(values)
    equal: list[bool] = same(torch.tensor([hash_of(value) for _, value in values])).tolist()
    return equal


def same(numbers: Tensor) -> Tensor:
    """Compare numbers with those of all ranks, one by one."""
    low, high = numbers.clone(), numbers.clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(low, dist.ReduceOp.MIN, group=host_group())
        dist.all_reduce(high, dist.ReduceOp.MAX, group=host_group())
    return low == high


# -- a hash of a tensor, on the device where it is -------------------------------------------------


def hash_of(value: Tensor) -> int:
    """Sum the numbers that its bits are, each times an odd number of its place, modulo 2**64.

    No single bit can change unseen, because an odd number times a power of two is never zero.
    """
    data = value.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for piece in numbers_of(data):
        odd = odd_numbers(piece.device, 1 << max(piece.numel() - 1, 1023).bit_length())
        total = total * BETWEEN_PIECES + (piece * odd[: piece.numel()]).sum()
    return int(total)


def numbers_of(data: Tensor) -> Sequence[Tensor]:
    """Read bytes as whole numbers, so many at a time."""
    padded = torch.nn.functional.pad(data, (0, -data.numel() % 8)) if data.numel() % 8 else data
    return torch.split(padded.view(torch.int64), NUMBERS_AT_ONCE)


@functools.cache
def odd_numbers(device: torch.device, count: int) -> Tensor:
    """Return the first `count`, always the same ones; all of them would cost each rank 30 ms."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator)
    return numbers.mul_(2).add_(1).to(device)
