"""Two ranks whose collectives differ are named; one that is only slower is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from orchestrator.engine.sharding.block_order import (
    KEPT_COLLECTIVES,
    BlockOrder,
    Watch,
    difference,
    packed,
    unpacked,
)

COPIES = [[0, 1], [2, 3]]


def order(blocks: Sequence[str], *, trains: bool = True) -> BlockOrder:
    own = BlockOrder(COPIES)
    for block in blocks:
        own.gathers(block)
    own.end_forward()
    for block in blocks[::-1] if trains else ():
        own.summed(block, [])
    if trains:
        own.end_step()
    return own


def compared(orders: dict[int, BlockOrder]) -> str:
    """Send them through the store's form, as the ranks do."""
    texts = {rank: packed(own) for rank, own in orders.items()}
    published = {rank: unpacked(text.encode()) for rank, text in texts.items() if text}
    assert len(published) == len(orders)
    return str(difference(published, COPIES, "the fix") or "")


def test_the_first_position_that_differs_is_named() -> None:
    text = compared({0: order(["a", "b", "c"]), 1: order(["a", "c"])})
    assert text == (
        "the ranks use different blocks of the model, and would wait for each other forever:"
        " rank 0 gathers b where rank 1 gathers c\n  the fix"
    )
    assert "rank 0 gathers b where rank 1 ends the forward" in compared(
        {0: order(["a", "b"]), 1: order(["a"])}
    )


def test_a_rank_that_is_behind_is_not_named() -> None:
    behind = order(["a", "b"])
    ahead = order(["a", "b"])
    for _ in range(3):
        ahead.gathers("a")
    assert compared({0: ahead, 1: behind, 2: behind}) == ""


def test_copies_may_gather_other_blocks_and_sum_the_same() -> None:
    """In an evaluation each copy is by itself; in training all sum together."""
    other = {rank: order(["a", "b"][: 1 + rank // 2], trains=False) for rank in range(4)}
    assert compared(other) == ""
    other = {rank: order(["a", "b"][: 1 + rank // 2]) for rank in range(4)}
    assert "rank 1 sums a where rank 2 sums b" in compared(other)


def test_parameters_that_are_left_out_count() -> None:
    first, other = order(["a"], trains=False), order(["a"], trains=False)
    first.summed("a", [])
    other.summed("a", [1])
    assert "rank 0 sums a where rank 1 sums a without its parameters [1]" in compared(
        {0: first, 1: other}
    )


def test_only_what_both_still_know_is_compared() -> None:
    long, short = BlockOrder(COPIES), BlockOrder(COPIES)
    short.gathers("b")  # the other has forgotten what it did then
    for own, count in ((long, KEPT_COLLECTIVES + 5), (short, 4)):
        for _ in range(count):
            own.gathers("a")
    assert compared({0: long, 1: short}) == ""


def test_a_model_is_not_compared_with_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stood still in an earlier training has left its record in the store."""
    store = dist.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def stand_still(rank: int, number: int, block: str) -> str:
        own = order([block])
        own.number = number
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        watch = Watch(own, "the fix")
        monkeypatch.setattr(watch, "_give_up", lambda verdict: None)
        watch._compare(own.count)
        return watch.verdict()

    assert stand_still(1, 0, "a") == stand_still(0, 1, "b") == ""
    assert stand_still(1, 1, "b") == stand_still(0, 1, "b") == ""
    assert "rank 0 gathers b where rank 1 gathers a" in stand_still(0, 0, "b")
