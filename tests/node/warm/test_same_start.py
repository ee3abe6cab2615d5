"""A warm start, and every further attempt, differs from a cold one in nothing but the time."""

from __future__ import annotations

import pytest

from tests.node.warm.conftest import WarmNode
from tests.node.warm.same_start import a_round

pytestmark = pytest.mark.slow

FEW = 1


def check(node: WarmNode, seed: int) -> list[bool]:
    """Compare the starts of one draw; return which of them were warm."""
    warm = []
    for start in a_round(seed, node):
        assert not start.found, f"draw {seed}, {start.kind}: {start.found}"
        assert start.warm or start.why, f"draw {seed}, {start.kind}: cold, and nobody says why"
        warm.append(start.warm)
    return warm


@pytest.mark.parametrize("seed", range(FEW))
def test_what_a_rank_sees(node: WarmNode, seed: int) -> None:
    check(node, seed)
