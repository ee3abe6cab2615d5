"""A few rounds of random faults; scripts/bench/chaos.py does it for as long as one likes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clusters.netns import NetnsCluster
from tests.end_to_end.chaos import Chaos, told

pytestmark = pytest.mark.cluster

ROUNDS = 3


def test_whatever_comes_leaves_nothing_behind(
    netns_cluster: Callable[..., NetnsCluster],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """The seed is fixed, so that a red run says something about the change, not about luck."""
    with Chaos(netns_cluster(2, tmpfs=[Path.home()]), tmp_path, seed=2) as chaos:
        for _ in range(ROUNDS):
            chaos.round()
        record_property("chaos", told(chaos))
        assert not chaos.broken, told(chaos)
