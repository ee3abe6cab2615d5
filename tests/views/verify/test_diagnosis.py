"""Measurements in, the slow node, link or device out: 2 to 64 nodes, even and odd."""

import random
from collections.abc import Callable

import pytest

from orchestrator.views.verify import command
from orchestrator.views.verify.command import Rates

GBIT = 1e9 / 8
FAST, SLOW = 9.4 * GBIT, 0.9 * GBIT
COUNTS = [3, 4, 9, 64]


def rates(
    count: int,
    slow: Callable[[int, int], bool] = lambda a, b: False,
    noise: float = 0.0,
    seed: int = 0,
) -> Rates:
    """Every pair of so many nodes; noise only ever takes something away."""
    dice = random.Random(seed)
    return {
        (a, b): (SLOW if slow(a, b) else FAST) * max(0.05, 1 - abs(dice.gauss(0, noise)))
        for a in range(count)
        for b in range(count)
        if a != b
    }


def names(count: int) -> list[str]:
    return [f"node {i} (host{i})" for i in range(count)]


def told(made: Rates) -> list[str]:
    count = max(max(pair) for pair in made) + 1
    return [one.text for one in command.slow_links(made, names(count))]


@pytest.mark.parametrize("count", [2, *COUNTS])
def test_equal_nodes_give_no_finding(count: int) -> None:
    assert told(rates(count)) == []


@pytest.mark.parametrize("count", [2, *COUNTS])
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_noise_gives_no_finding(count: int, noise: float) -> None:
    """As it is measured: what came out slow was measured twice again, and the best counts."""
    for seed in range(100 if count < 10 else 5):
        tries = [rates(count, noise=noise, seed=3 * seed + i) for i in range(3)]
        best = {pair: max(one[pair] for one in tries) for pair in tries[0]}
        assert told(best) == [], (seed, best)


CROWDED = [[5.35, 4.62, 4.92], [4.94, 7.3, 4.12], [5.07, 9.68, 7.24], [6.08, 3.51, 6.56]]
SLOWED = [[4.3, 5.4, 0.0193], [7.11, 2.1, 0.022], [4.09, 3.35, 0.0205], [0.0188, 0.0192, 0.0192]]


def as_rates(rows: list[list[float]]) -> Rates:
    """Gb/s from a node (rows) to the others (columns, without itself)."""
    return {
        (a, b): row[b if b < a else b - 1] * GBIT
        for a, row in enumerate(rows)
        for b in range(len(rows))
        if a != b
    }


def test_shared_cores_give_no_false_finding() -> None:
    """As they were measured: healthy, and with the link of node 3 slowed to 20 Mbit."""
    assert told(as_rates(CROWDED)) == []
    assert told(as_rates(SLOWED)) == [
        "node 3 (host3) reaches everyone at 19.2 Mb/s, others 5.4 Gb/s"
    ]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_slow_node_is_named_once(count: int, noise: float) -> None:
    last = count - 1
    (text,) = told(rates(count, lambda a, b: last in (a, b), noise))
    if noise:
        assert text.startswith(f"node {last} (host{last}) reaches everyone at 0.")
    else:
        assert text == f"node {last} (host{last}) reaches everyone at 0.9 Gb/s, others 9.4 Gb/s"


@pytest.mark.parametrize("count", COUNTS)
def test_node_slow_in_one_direction_is_named(count: int) -> None:
    (text,) = told(rates(count, lambda a, b: a == 1))
    assert text == (
        "node 1 (host1) sends to everyone at 0.9 Gb/s, others 9.4 Gb/s; it receives at 9.4 Gb/s"
    )
    (text,) = told(rates(count, lambda a, b: b == 0))
    assert text == (
        "node 0 (host0) receives from everyone at 0.9 Gb/s, others 9.4 Gb/s; it sends at 9.4 Gb/s"
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_slow_pair_is_named_as_link(count: int, noise: float) -> None:
    (found,) = command.slow_links(rates(count, lambda a, b: {a, b} == {0, 2}, noise), names(count))
    assert (found.kind, found.nodes) == ("link", (0, 2))
    if not noise:
        assert found.text == (
            "the link between node 0 (host0) and node 2 (host2) has 0.9 Gb/s there and 0.9 Gb/s"
            " back, others 9.4 Gb/s"
        )


@pytest.mark.parametrize("count", COUNTS)
def test_slow_direction_of_pair_is_named(count: int) -> None:
    (text,) = told(rates(count, lambda a, b: (a, b) == (2, 1)))
    assert (
        text
        == "node 2 (host2) reaches node 1 (host1) at 0.9 Gb/s; back it is 9.4 Gb/s, others 9.4 Gb/s"
    )


def test_two_nodes_allow_finding_by_direction_alone() -> None:
    (text,) = told(rates(2, lambda a, b: a == 1))
    assert text == "node 1 (host1) reaches node 0 (host0) at 0.9 Gb/s; back it is 9.4 Gb/s"
    assert told(rates(2, lambda a, b: True)) == []


def test_fast_neighbours_make_no_others_slow() -> None:
    made = {**rates(8), (0, 1): 5 * FAST, (1, 0): 5 * FAST}
    assert told(made) == []


def test_missing_pairs_give_no_finding() -> None:
    assert command.slow_links({}, []) == []
    # The speed of the other direction is unknown.
    assert told({(0, 1): FAST, (1, 0): FAST, (0, 2): SLOW}) == []


@pytest.mark.parametrize(
    ("rate", "promised", "expected"),
    [
        (20e6 / 8, [1.25e9, 1.25e9], ["node 0 (host0) and node 1 (host1) reach each other at"
                                      " 20 Mb/s; their interfaces say 10 Gb/s"]),
        (20e6 / 8, [1.25e9, None], []),
        # One socket cannot fill such a link.
        (12 * GBIT, [400 * GBIT, 400 * GBIT], []),
        (0.94 * GBIT, [GBIT, GBIT], []),
    ],
)  # fmt: skip
def test_promised_rate_is_checked(
    rate: float, promised: list[float | None], expected: list[str]
) -> None:
    made = {(0, 1): rate, (1, 0): rate}
    assert [one.text for one in command.below_promise(made, promised, names(2))] == expected


@pytest.mark.parametrize(
    ("flops", "kind", "slow"),
    [
        ([790e12] * 8, "H200", []),
        ([790e12] * 7 + [610e12], "H200", [7]),
        ([790e12, 782e12, 775e12, 801e12, 760e12, 790e12, 785e12, 770e12], "H200", []),
        # Of two GPUs the faster may be the odd one, unless the difference is large.
        ([790e12, 300e12], "H200", []),
        ([790e12, 200e12], "H200", [1]),
        ([50e9, 47e9, 31e9, 52e9, 44e9, 38e9], "CPU", []),
        ([50e9, 49e9, 51e9, 50e9, 12e9, 50e9], "CPU", [4]),
        ([50e9], "CPU", []),
    ],
)
def test_slow_device_is_named(flops: list[float], kind: str, slow: list[int]) -> None:
    node_of = [rank // 2 for rank in range(len(flops))]
    found = command.slow_devices(flops, [kind] * len(flops), node_of, names(4))
    assert [int(one.text.split()[1]) for one in found] == slow
    assert [one.nodes for one in found] == [(rank // 2,) for rank in slow]


def test_devices_of_two_kinds_are_not_compared() -> None:
    kinds = ["H200", "L4"] * 4
    assert command.slow_devices([790e12, 100e12] * 4, kinds, [0] * 8, names(1)) == []


def test_wrong_result_is_described() -> None:
    one = {"collective": "all_reduce", "scope": "all", "bytes": 1024, "rank": 3, "element": 17,
           "got": 5.0, "expected": 6.0}  # fmt: skip
    (found,) = command.wrong_results([{**one, "bytes": 4096}, one], [0, 0, 1, 1], names(2))
    assert found.text == (
        "all_reduce of 1 KiB gave rank 3 on node 1 (host1) a wrong result: element 17 is 5, not 6"
    )
