"""A few faults in one training; scripts/bench/no_seam.py takes as many as one likes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.clusters.netns import NetnsCluster
from tests.end_to_end.harm import FAULTS, Seam
from tests.end_to_end.no_seam import BATCH, NODES, NoSeam, Trained, compare, order

pytestmark = pytest.mark.cluster

FEW, STEPS = 3, 3
WHOLE = Trained(
    {step: 1.0 / step for step in range(1, STEPS + 1)},
    {
        (step, rank): tuple(BATCH * (NODES * (step - 1) + rank) + number for number in range(BATCH))
        for step in range(1, STEPS + 1)
        for rank in range(NODES)
    },
    ("a", "b", "c", "d"),
)


def test_faults_leave_no_trace(
    netns_cluster: Callable[..., NetnsCluster],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    one = NoSeam(netns_cluster(NODES + 1), tmp_path, seed=6, faults=FEW)
    one.run()
    record_property("faults", [vars(fault) for fault in one.noted])
    assert len(one.noted) == FEW


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (replace(WHOLE, losses={**WHOLE.losses, 2: 0.5 + 1e-12}), "from step 2 on"),
        (replace(WHOLE, losses={1: 1.0, 2: 0.5}), "2 of 3 steps"),
        (replace(WHOLE, samples={**WHOLE.samples, (3, 1): (0, 1)}), "not seen once"),
        (replace(WHOLE, weights=("a", "b", "c", "e")), "weights"),
    ],
)
def test_every_trace_is_seen(broken: Trained, what: str) -> None:
    compare(WHOLE, WHOLE, STEPS)
    with pytest.raises(Seam, match=what):
        compare(broken, WHOLE, STEPS)


def test_a_seed_repeats_the_order_and_every_kind_comes() -> None:
    assert order(Random(3), 50) == order(Random(3), 50) != order(Random(4), 50)
    assert set(order(Random(3), 50)) == set(FAULTS)
    assert [len(order(Random(3), faults)) for faults in (1, 6, 50)] == [1, 6, 50]
