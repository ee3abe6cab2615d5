"""What a rank of another layout needs, and from which shards; tensors cut in every way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from orchestrator.engine.saving.in_memory.exchange import (
    AT_ONCE_BYTES,
    Box,
    box_of,
    empty,
    pieces_for,
    rounds,
)
from orchestrator.engine.saving.in_memory.memory_file import Place

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def place(whole: Sequence[int], box: Box, name: str = "w", dtype: str = "torch.float32") -> Place:
    return Place(name, dtype, box.shape, 0, tuple(whole), box.start)


def cut(whole: tuple[int, ...], dim: int, count: int) -> list[Box]:
    """As FSDP cuts: alike, the last ones shorter or empty. What has no dimensions is on all."""
    if not whole:
        return [Box((), ())] * count
    length = -(-whole[dim] // count)
    boxes = []
    for index in range(count):
        at = min(index * length, whole[dim])
        start, shape = [0] * len(whole), list(whole)
        start[dim], shape[dim] = at, min(length, whole[dim] - at)
        boxes.append(Box(tuple(start), tuple(shape)))
    return boxes


@given(SHAPES, st.integers(1, 5), st.integers(1, 5), st.data())
def test_any_layout_becomes_any_other(
    whole: tuple[int, ...], before: int, after: int, data: st.DataObject
) -> None:
    dims = st.integers(0, max(0, len(whole) - 1))
    old, new = cut(whole, data.draw(dims), before), cut(whole, data.draw(dims), after)
    content = torch.arange(float(math.prod(whole))).view(whole)
    everything = Box((0,) * len(whole), whole)
    # Each shard is there twice, as where two nodes have a copy.
    kept = {n: [place(whole, box)] for n, box in enumerate([*old, *old])}
    near = data.draw(st.sets(st.sampled_from(sorted(kept))))
    for box in new:
        own = place(whole, box)
        pieces, problem = pieces_for([own], kept, near)
        assert not problem
        assert sum(piece.box.size for piece in pieces) == box.size, "nothing comes twice"
        found: Tensor = empty(own).fill_(-1)
        for piece in pieces:
            source = box_of(kept[piece.shard][0])
            shard = source.of(content, everything)
            piece.box.of(found, box).copy_(piece.box.of(shard, source))
            alike = {shard for shard, (other,) in kept.items() if box_of(other) == source}
            assert piece.shard in near or not alike & near
        assert torch.equal(found, box.of(content, everything))


@pytest.mark.parametrize(
    ("kept", "problem"),
    [
        ([], "not all of w is there"),
        ([place((4,), Box((0,), (3,)))], "not all of w is there"),
        ([place((5,), Box((0,), (5,)))], "w was another tensor"),
        ([place((4,), Box((0,), (4,)), dtype="torch.bfloat16")], "w was another tensor"),
        (
            [place((4,), Box((0,), (4,))), place((4,), Box((0,), (4,)), "bias")],
            "bias is not in this model",
        ),
    ],
)
def test_what_cannot_be_put_together_is_named(kept: list[Place], problem: str) -> None:
    wanted = [place((4,), Box((0,), (4,)))]
    assert pieces_for(wanted, {0: kept}, set())[1] == problem


def test_tensors_travel_some_at_a_time() -> None:
    large = AT_ONCE_BYTES // 4
    sizes = {"a": large // 2, "b": large // 2, "c": 2 * large, "d": 1, "e": large}
    places = {name: place((size,), Box((0,), (1,)), name) for name, size in sizes.items()}
    assert rounds(places) == [{"a", "b"}, {"c"}, {"d"}, {"e"}]
