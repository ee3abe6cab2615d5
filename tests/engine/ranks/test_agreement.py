"""What is equal on all ranks is found out by hashes, and only what differs is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.ranks import agreement
from tests.engine import pair

pytestmark = pytest.mark.slow


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=40), st.integers(0))
def test_a_hash_sees_every_bit(data: bytes, directory: int) -> None:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    other = tensor.clone()
    other[directory // 8 % len(data)] ^= 1 << directory % 8
    assert agreement.hash_of(tensor) == agreement.hash_of(tensor.clone())
    assert agreement.hash_of(tensor) != agreement.hash_of(other)


def test_a_hash_sees_places_pieces_and_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(50, dtype=torch.float64)
    hashes = {agreement.hash_of(numbers), agreement.hash_of(numbers.flip(0))}
    monkeypatch.setattr(agreement, "NUMBERS_AT_ONCE", 16)  # the weights of a place stay the same
    hashes |= {agreement.hash_of(numbers), agreement.hash_of(numbers.flip(0))}
    swapped = torch.cat([numbers[16:32], numbers[:16], numbers[32:]])
    assert len(hashes | {agreement.hash_of(swapped)}) == 5
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.complex64, torch.float32):
        assert agreement.hash_of(torch.zeros(3, dtype=dtype)) == 0
        assert agreement.hash_of(torch.ones((), dtype=dtype)) != 0


def test_a_small_tensor_needs_few_weights_and_they_are_the_first_of_all() -> None:
    few, many = (agreement.odd_numbers(torch.device("cpu"), count) for count in (1 << 10, 1 << 14))
    assert torch.equal(few, many[: 1 << 10]) and bool((many % 2 == 1).all())
    agreement.odd_numbers.cache_clear()
    for numel in (1, 1024, 1025, 5000):
        agreement.hash_of(torch.zeros(numel, dtype=torch.int64))
    assert agreement.odd_numbers.cache_info().currsize == 3  # of 1024, 2048 and 8192


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.register_buffer("seen", torch.tensor(float("nan")))


def takes_weights(rank: int, directory: Path) -> None:
    model, sent = Model(), []
    broadcast = dist.broadcast

    def counted(tensor: torch.Tensor, *more: Any, **named: Any) -> Any:
        sent.append(tensor.shape)
        return broadcast(tensor, *more, **named)

    dist.broadcast = counted
    agreement.take_weights_of_first(model)
    agreement.refuse_differences(model)
    assert sent == [], "NaN or not, the bits are the same"
    with torch.no_grad():
        model.layers[2].bias[1] += rank
    for refused in (agreement.refuse_differences,):
        with pytest.raises(CheckFailed, match=r"layers\.2\.bias has other values on some"):
            refused(model)
    agreement.take_weights_of_first(model)
    dist.broadcast = broadcast
    assert sent == [(3,)]
    assert torch.equal(model.layers[2].bias, Model().layers[2].bias)
    if rank:
        model.layers[1] = nn.Linear(3, 3, bias=False)
    with pytest.raises(CheckFailed, match=r"rank 1 lacks \[\('layers\.1\.bias', \(3,\)"):
        agreement.take_weights_of_first(model)


def test_only_what_differs_is_sent(tmp_path: Path) -> None:
    pair.run(takes_weights, tmp_path)
