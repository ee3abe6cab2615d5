import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.config.sharding import group_size


@pytest.mark.parametrize(
    ("nodes", "wanted", "size"),
    [
        ([0, 0, 1, 1], None, 2),
        ([0, 0, 0, 0], None, 4),
        ([0, 1], None, 1),
        ([0, 0, 0, 0, 1, 1, 1, 1], 2, 2),
        # Whole nodes form a group.
        ([0, 0, 1, 1, 2, 2, 3, 3], 4, 4),
        # The nodes are unequal, but every group is on one node.
        ([0, 0, 0, 0, 1, 1], 2, 2),
        ([0, 0, 1, 1], 1, 1),
    ],
)
def test_group_size_fits_nodes(nodes: list[int], wanted: int | None, size: int) -> None:
    assert group_size(nodes, wanted) == size


@pytest.mark.parametrize(
    ("nodes", "wanted", "words"),
    [
        ([0, 0, 1], None, "need the same number of ranks; here they have 2, 1"),
        ([0, 0, 1, 1], 3, "does not divide the 4 ranks"),
        ([0, 0, 0, 1, 1, 1], 2, "ranks 2 to 3 would share one copy across the edge"),
        ([0] * 4 + [1] * 4 + [2] * 4, 6, "ranks 0 to 5 would share one copy"),
    ],
)
def test_group_across_slow_links_is_refused(
    nodes: list[int], wanted: int | None, words: str
) -> None:
    with pytest.raises(CheckFailed, match=words):
        group_size(nodes, wanted)
