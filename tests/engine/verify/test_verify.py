"""The parts of a verify run that need no ranks: values and their check, rounds of pairs."""

from __future__ import annotations

import itertools

import pytest
import torch

from orchestrator.engine.verify import collective_bench, pair_bench
from orchestrator.engine.verify.collective_bench import COLLECTIVES, ELEMENTS_AT_ONCE, Collective
from orchestrator.engine.verify.world import World


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 9, 63, 64])
def test_all_nodes_meet_once_and_nobody_twice_in_a_round(nodes: int) -> None:
    plan = pair_bench.rounds(nodes)
    assert sorted(itertools.chain(*plan)) == list(itertools.combinations(range(nodes), 2))
    assert len(plan) == (nodes - 1 if nodes % 2 == 0 else nodes) * (nodes > 1)
    for meetings in plan:
        players = list(itertools.chain(*meetings))
        assert len(players) == len(set(players))


def test_pairs_that_came_out_slow_are_those_measured_again() -> None:
    best = {(0, 1): {"rate": 10.0}, (1, 0): {"rate": 9.0}, (0, 2): {"rate": 3.0}}
    assert pair_bench.suspects(best) == {(0, 2)}
    pair_bench.keep(best, [{"from": 0, "to": 2, "rate": 9.5}, {"from": 0, "to": 1, "rate": 1.0}])
    assert pair_bench.suspects(best) == set()


@pytest.mark.parametrize("count", [1, 61, 1024, ELEMENTS_AT_ONCE, ELEMENTS_AT_ONCE + 5])
@pytest.mark.parametrize("start", [0, 512, ELEMENTS_AT_ONCE - 3])
def test_the_first_wrong_element_is_found(count: int, start: int) -> None:
    tensor = torch.empty(count)
    collective_bench.fill(tensor, 7, start)
    assert collective_bench.first_wrong(tensor, 7, start) is None
    assert tensor[0] == 7 * (start % 61 + 1)
    for at in {0, count // 2, count - 1}:
        spoiled = tensor.clone()
        spoiled[at] += 1
        spoiled[-1] += 1
        found = collective_bench.first_wrong(spoiled, 7, start)
        assert found == (at, float(spoiled[at]), float(tensor[at]))
    spoiled[0] = float("nan")
    assert collective_bench.first_wrong(spoiled, 7, start) is not None


def simulated(one: Collective, ranks: int, count: int) -> list[tuple[World, torch.Tensor]]:
    """What each rank has after the collective, worked out here."""
    cpu = torch.device("cpu")
    worlds = [World(me, ranks, me, "gloo", cpu, (0,) * ranks, ("host",) * ranks)
              for me in range(ranks)]  # fmt: skip
    made = [collective_bench.prepare(one, world, count) for world in worlds]
    ins = [out_of for _, out_of in made]
    intos = [into for into, _ in made]
    total = torch.stack(intos if one.name == "all_reduce" else ins).sum(0)
    results = {
        "all_reduce": lambda me: total,
        "all_gather": lambda me: torch.cat(ins),
        "reduce_scatter": lambda me: total.chunk(ranks)[me],
        "broadcast": lambda me: intos[0],
        "send_recv": lambda me: ins[me - 1],
    }
    return [(world, results[one.name](world.rank)) for world in worlds]


@pytest.mark.parametrize("one", COLLECTIVES, ids=lambda one: one.name)
@pytest.mark.parametrize(("ranks", "count"), [(2, 256), (3, 255), (8, 4096), (64, 4096)])
def test_a_right_result_passes_and_a_swapped_one_does_not(
    one: Collective, ranks: int, count: int
) -> None:
    results = simulated(one, ranks, count)
    for world, into in results:
        assert collective_bench.check(one, world, into) is None
        assert collective_bench.check(one, world, into.flip(0)) is not None
    if one.name in ("reduce_scatter", "send_recv"):  # each rank has a result of its own
        (first, _), (_, other) = results[0], results[1]
        assert collective_bench.check(one, first, other) is not None


def test_sums_are_exact_in_float32() -> None:
    """The largest sum of 16384 ranks is below 2 to the 24."""
    assert sum(map(collective_bench.weight, range(16384))) * collective_bench.PERIOD < 1 << 24


@pytest.mark.parametrize(
    ("name", "two", "eight"),
    [("all_reduce", 1, 1.75), ("all_gather", 0.5, 0.875), ("reduce_scatter", 0.5, 0.875),
     ("broadcast", 1, 1), ("send_recv", 1, 1)],
)  # fmt: skip
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, two: float, eight: float) -> None:
    (one,) = [one for one in COLLECTIVES if one.name == name]
    assert (one.busbw(2), one.busbw(8)) == (two, eight)
