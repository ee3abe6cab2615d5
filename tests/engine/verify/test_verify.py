"""The parts of a verify run that need no ranks: values and their check, rounds of pairs."""

import itertools

import pytest
import torch

from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.verify import collective_bench, pair_bench
from orchestrator.engine.verify.collective_bench import COLLECTIVES


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 9, 64])
def test_rounds_pair_all_nodes_once(nodes: int) -> None:
    plan = pair_bench.rounds_of_pairs(nodes)
    assert sorted(itertools.chain(*plan)) == list(itertools.combinations(range(nodes), 2))
    assert len(plan) == (nodes - 1 if nodes % 2 == 0 else nodes) * (nodes > 1)
    for meetings in plan:
        players = list(itertools.chain(*meetings))
        assert len(players) == len(set(players))


def ranks_of(rank: int, size: int) -> Ranks:
    return Ranks(rank, size, rank, torch.device("cpu"), ((0, "host"),) * size)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(("size", "count"), [(2, 256), (3, 255), (8, 4096)])
def test_first_wrong_finds_wrong_element(name: str, size: int, count: int) -> None:
    own = [
        collective_bench.repeated_pattern(
            ranks_of(rank, size), count, collective_bench.factor_of_rank(rank)
        )
        for rank in range(size)
    ]
    summed = torch.stack(own).sum(0)
    gathered = torch.cat([each[: count // size] for each in own])
    for rank in range(size):
        ranks = ranks_of(rank, size)
        right = {
            "all_reduce": summed,
            "all_gather": gathered,
            "reduce_scatter": summed.chunk(size)[rank],
        }[name]
        call = COLLECTIVES[name][0](ranks, count)
        call.result.copy_(right)
        assert collective_bench.first_wrong(call) is None
        last = len(right) - 1
        call.result[[last // 2, last]] += 1
        was = float(right[last // 2])
        found = {"element": last // 2, "got": was + 1, "expected": was}
        assert collective_bench.first_wrong(call) == found
        call.result.copy_(right.flip(0))
        assert collective_bench.first_wrong(call) is not None


def test_sums_are_exact_in_float32() -> None:
    assert (
        sum(map(collective_bench.factor_of_rank, range(16384))) * collective_bench.PERIOD < 1 << 24
    )


@pytest.mark.parametrize(
    ("name", "two", "eight"),
    [("all_reduce", 1, 1.75), ("all_gather", 0.5, 0.875), ("reduce_scatter", 0.5, 0.875)],
)
def test_bus_bandwidth_follows_nccl_tests(name: str, two: float, eight: float) -> None:
    busbw = COLLECTIVES[name][1]
    assert (busbw(2), busbw(8)) == (two, eight)
