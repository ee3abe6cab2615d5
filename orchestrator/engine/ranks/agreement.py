"""Check that values are equal: on all ranks, by one hash of each, and to their earlier copies.

The values stay where they are: a rank sends hashes of 8 bytes, whatever the number of ranks. Names
are compared, or weights sent, only where hashes differ.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.ranks import plain_names
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
    named = (*model.named_parameters(), *model.named_buffers())
    return [inner for pair in named for inner in plain_names.made_of(*pair)]


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
    return int(hash_there(value))


def hash_there(value: Tensor) -> Tensor:
    """Sum of the numbers that its bits are, each times an odd number of its place, modulo 2**64.

    The result is still on the device: nobody waits for it. No single bit can change unseen, because
    an odd number times a power of two is never zero.
    """
    inside = [tensor for _, tensor in plain_names.made_of("", value)]
    if inside[0] is not value:
        return torch.stack([hash_there(tensor) for tensor in inside]).cumsum(0).sum()
    data = value.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for piece in numbers_of(data):
        odd = odd_numbers(piece.device, 1 << max(piece.numel() - 1, 1023).bit_length())
        total = total * BETWEEN_PIECES + (piece * odd[: piece.numel()]).sum()
    return total


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


# -- tensors that have not changed since they were copied ------------------------------------------


SUMS = 2
BETWEEN_SUMMED = 0xD6E8FEB86659FD93 - (1 << 64)


class Copies:
    """Copies in host memory, by name, and what shows later on whether they are still right."""

    def __init__(self) -> None:
        self.copies: dict[str, Tensor] = {}
        self.sums: dict[str, list[int]] = {}  # of tensors on a GPU

    def note(self, values: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        """Remember what is copied just now, or has just been found equal."""
        self.copies.update(copies)
        self.sums.update(sums_there(values))

    def equal(self, values: Mapping[str, Tensor]) -> set[str]:
        """Name the tensors that are as they were; this waits for the GPU."""
        alike = {
            name: value
            for name, value in values.items()
            if (copy := self.copies.get(name)) is not None
            and (copy.shape, copy.dtype) == (value.shape, value.dtype)
        }
        sums = sums_there(alike)
        return {
            name
            for name, value in alike.items()
            if (sums[name] == self.sums.get(name) if name in sums else
                is_on_host(value) and same_bits(value, self.copies[name]))
        }  # fmt: skip


def is_on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"


def memory_of(value: Tensor) -> Tensor | None:
    """Return the bytes of a tensor; None for one that has no memory of its own, as some quantised
    ones, which are made of others."""
    try:
        plain = value.detach().as_subclass(Tensor).contiguous().reshape(-1).view(torch.uint8)
        return plain if plain.data_ptr() or not plain.numel() else None
    except RuntimeError:
        return None


def same_bits(value: Tensor, other: Tensor) -> bool:
    """Compare two tensors of one shape and type; the second is in host memory."""
    one, two = memory_of(value), memory_of(other)
    if one is None or two is None or one.numel() != two.numel():
        return False
    if is_on_host(one):
        return not memcmp()(one.data_ptr(), two.data_ptr(), one.numel())
    pieces = zip(*(torch.split(data, NUMBERS_AT_ONCE * 8) for data in (one, two)), strict=True)
    return all(torch.equal(there, copy.to(there.device)) for there, copy in pieces)


@functools.cache
def memcmp() -> Callable[[int, int, int], int]:
    """Return the C library's: as fast as a copy, and 1.8 times as fast as torch.equal()."""
    function = ctypes.CDLL(None).memcmp
    function.argtypes, function.restype = [ctypes.c_void_p] * 2 + [ctypes.c_size_t], ctypes.c_int
    return function


# -- on a GPU -----------------------------------------------------------------------------------


def sums_there(values: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return the sums of all that are on a GPU; their devices are waited for once."""
    found: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in values.items():
        if not is_on_host(value) and (data := memory_of(value)) is not None:
            found.setdefault(value.device, {})[name] = sums_of(data)
    return {
        name: sums
        for there in found.values()
        for name, sums in zip(there, torch.stack([*there.values()]).tolist(), strict=True)
    }


def sums_of(data: Tensor) -> Tensor:
    """Add up the halves of all 8 bytes, each times a random number of its place, modulo 2**64.

    Halves have room for their product, so that the chance to miss a change is below 2**-32 for each
    sum even if only the top bits change, as a sign does, and about 2**-64 if any others do.
    """
    totals = torch.zeros(SUMS, dtype=torch.int64, device=data.device)
    for low in numbers_of(data):
        factors = random_numbers(data.device)[:, :, : low.numel()]
        high = low >> 32
        piece = [(low * pair[0] + high * pair[1]).sum() for pair in factors]
        totals = totals * BETWEEN_SUMMED + torch.stack(piece)
    return totals


@functools.cache
def random_numbers(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    least, most = -(1 << 63), (1 << 63) - 1
    return torch.randint(least, most, (SUMS, 2, NUMBERS_AT_ONCE), generator=generator).to(device)
