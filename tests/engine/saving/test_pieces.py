"""What a rank of another layout needs, and from which shards; tensors cut in every way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.engine.saving.exchange import AT_ONCE_BYTES, rounds
from orchestrator.engine.saving.pieces import Box, Piece, Place, pieces_for

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def place(whole: Sequence[int], box: Box | None = None, name: str = "w") -> Place:
    box = box or Box((0,) * len(whole), tuple(whole))
    return Place(box.start, box.shape, name, "torch.float32", tuple(whole))


def cut(whole: tuple[int, ...], dim: int, count: int) -> list[Place]:
    """As FSDP cuts: alike, the last ones shorter or empty. What has no dimensions is on all."""
    if not whole:
        return [place(())] * count
    length = -(-whole[dim] // count)
    places = []
    for index in range(count):
        at = min(index * length, whole[dim])
        start, shape = [0] * len(whole), list(whole)
        start[dim], shape[dim] = at, min(length, whole[dim] - at)
        places.append(place(whole, Box(tuple(start), tuple(shape))))
    return places


@given(SHAPES, st.integers(1, 5), st.integers(1, 5), st.data())
def test_any_layout_becomes_any_other(
    whole: tuple[int, ...], before: int, after: int, data: st.DataObject
) -> None:
    dims = st.integers(0, max(0, len(whole) - 1))
    old, new = cut(whole, data.draw(dims), before), cut(whole, data.draw(dims), after)
    content = torch.arange(float(math.prod(whole))).view(whole)
    # Each shard is there twice, as where two nodes have a copy.
    kept = {number: [own] for number, own in enumerate([*old, *old])}
    near = data.draw(st.sets(st.sampled_from(sorted(kept))))
    for own in new:
        pieces, problem = pieces_for([own], kept, near)
        assert not problem
        assert sum(piece.box.size for piece in pieces) == own.size, "nothing comes twice"
        found = torch.full(own.shape, -1.0)
        for piece in pieces:
            shard = piece.place.of(content, place(whole))
            piece.box.of(found, own).copy_(piece.box.of(shard, piece.place))
            alike = {shard for shard, (other,) in kept.items() if other == piece.place}
            assert piece.shard in near or not alike & near
        assert torch.equal(found, own.of(content, place(whole)))


@pytest.mark.parametrize(
    ("kept", "problem"),
    [
        ([], "not all of w is there"),
        ([place((4,), Box((0,), (3,)))], "not all of w is there"),
        ([place((5,))], "w has the shape (5,) there, and (4,) here"),
        (
            [place((4,), None, f"w{n}") for n in range(5)],
            "not all of w is there; only there is w0, w1, w2 and 2 more",
        ),
        ([place((4,)), place((4,), None, "bias")], ""),
    ],
)
def test_what_cannot_be_put_together_is_named(kept: list[Place], problem: str) -> None:
    assert pieces_for([place((4,))], {0: kept}, set())[1] == problem


def test_tensors_travel_some_at_a_time() -> None:
    large = AT_ONCE_BYTES // 4
    sizes = {"a": large // 2, "b": large // 2, "c": 2 * large, "d": 1, "e": large}
    places = [place((size,), None, name) for name, size in sizes.items()]
    pieces = [Piece(0, own, own) for own in places]
    assert rounds(pieces) == [{"a", "b"}, {"c"}, {"d"}, {"e"}]
    halves = [Piece(n, own, Box((0,), (own.size // 2,))) for own in places[:3] for n in range(2)]
    assert rounds(reversed(halves)) == [{"a", "b"}, {"c"}], "in the same order on all ranks"
