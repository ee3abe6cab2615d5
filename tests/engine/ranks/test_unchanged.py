"""What was copied aside is unchanged while every bit of it is, however it may be written to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from orchestrator.engine.ranks import agreement
from orchestrator.engine.ranks.agreement import Copies, same_bits, sums_of

Write = Callable[[nn.Linear], object]


def by_optimizer(model: nn.Linear) -> None:
    model.weight.grad = torch.ones_like(model.weight)
    torch.optim.SGD([model.weight], lr=0.1).step()


def by_numpy(model: nn.Linear) -> None:
    model.weight.detach().numpy()[0, 0] += 1


def with_set(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight.set_(torch.randn(4, 3))


def another_parameter(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.randn(4, 3), requires_grad=False)


def no_grad(write: Write) -> Write:
    def wrapped(model: nn.Linear) -> None:
        with torch.no_grad():
            write(model)

    return wrapped


WAYS: dict[str, Write] = {
    "mul_": no_grad(lambda m: m.weight.mul_(1.5)),
    "data.mul_": lambda m: m.weight.data.mul_(1.5),
    "data.copy_": lambda m: m.weight.data.copy_(torch.randn(4, 3)),
    "data.lerp_": lambda m: m.weight.data.lerp_(torch.randn(4, 3), 0.001),
    "data =": lambda m: setattr(m.weight, "data", torch.randn(4, 3)),
    "the transposed data =": lambda m: setattr(m.weight, "data", torch.randn(3, 4).t()),
    "set_": with_set,
    "a view": lambda m: m.weight.data[1].add_(1),
    "foreach": no_grad(lambda m: torch._foreach_mul_([m.weight], 2.0)),
    "foreach of data": lambda m: torch._foreach_add_([m.weight.data], 1.0),
    "an optimizer": by_optimizer,
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.zeros(4, 3)}),
    "numpy": by_numpy,
    "another parameter": another_parameter,
    "one sign of zero": lambda m: m.weight.data.neg_(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_is_written_to_is_seen(way: str) -> None:
    model = nn.Linear(3, 4, bias=False).requires_grad_(False)
    if "zero" in way:
        model.weight.data.zero_()  # -0.0 == 0.0, and other bits
    copies = Copies()
    copies.note({"w": model.weight}, {"w": model.weight.clone()})
    assert copies.equal({"w": model.weight}) == {"w"}
    WAYS[way](model)
    assert copies.equal({"w": model.weight}) == set()


def test_version_counters_are_no_proof() -> None:
    """The reason why contents are compared. If this fails, torch has learned it."""
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    before = weight._version
    weight.data.mul_(2)
    assert weight._version == before


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3),
        torch.empty(0, 4),
        torch.tensor([True, False, True]),
        torch.arange(12, dtype=torch.int8).reshape(3, 4).t(),
        torch.ones(5, dtype=torch.bfloat16),
        torch.full((3,), float("nan")),
        torch.ones(3, dtype=torch.complex64),
    ],
)
def test_every_kind_of_tensor(value: Tensor) -> None:
    copies = Copies()
    copies.note({"x": value}, {"x": value.clone()})
    assert copies.equal({"x": value}) == {"x"}
    assert copies.equal({"x": value.unsqueeze(0)}) == set()
    assert copies.equal({"x": value.to(torch.complex128)}) == set()
    assert copies.equal({"y": value}) == set()
    if value.numel():
        other = value.contiguous().clone()
        other.reshape(-1).view(torch.uint8)[-1] ^= 1
        assert not same_bits(other, value)


class Packed(Tensor):
    """As the quantised weights of some libraries are: a class of its own, with plain memory."""


@pytest.mark.parametrize("value", [torch.ones(3).as_subclass(Packed), nn.Parameter(torch.ones(3))])
def test_a_class_of_its_own_is_compared_by_its_memory(value: Tensor) -> None:
    copies = Copies()
    copies.note({"x": value}, {"x": torch.ones(3)})
    assert copies.equal({"x": value}) == {"x"}
    value.data[2] = 2
    assert copies.equal({"x": value}) == set()


def test_a_tensor_without_memory_of_its_own_counts_as_changed() -> None:
    two = TwoTensor(torch.ones(3), torch.ones(3))  # here: making one imports the compiler, 1 s
    for value in (torch.ones(3, device="meta"), two):
        copies = Copies()
        copies.note({"x": value}, {"x": torch.ones(3)})
        assert copies.equal({"x": value}) == set(), type(value)


# -- the sums that stand for what is on a GPU -----------------------------------------------------


def sums(data: Tensor) -> list[int]:
    found: list[int] = sums_of(data.view(torch.uint8)).tolist()
    return found


@given(st.binary(min_size=1, max_size=200), st.data())
def test_other_bytes_have_other_sums(content: bytes, draw: st.DataObject) -> None:
    other = draw.draw(st.binary(min_size=len(content), max_size=len(content)))
    one, two = (torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in (content, other))
    assert (sums(one) == sums(two)) == (content == other)


def test_changes_of_top_bits_alone_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a sum of whole products would keep nothing of an even number of them."""
    monkeypatch.setattr(agreement, "NUMBERS_AT_ONCE", 64)
    agreement.random_numbers.cache_clear()
    values = torch.randn(1000, dtype=torch.float64)
    first = sums(values)
    for places in ([0, 1], [3, 999], [5, 69], list(range(1000)), list(range(0, 1000, 64))):
        values[places] *= -1
        assert sums(values) != first
        assert all(one != other for one, other in zip(sums(values), first, strict=True))
        values[places] *= -1
    assert sums(values) == first
    assert sums(values.roll(64)) != first
    agreement.random_numbers.cache_clear()
