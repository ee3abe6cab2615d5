"""The nodes that a number or a name selects."""

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.nodes.node_list import choose_nodes, indices_in_words, parse_nodes

NODES = parse_nodes("gpu1\ngpu2 spare\nbob@gpu3\ngpu3:2222\n7\n", "list")


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ([], [0, 1, 2, 3, 4]),
        (["0"], [0]),
        # A spare is numbered after all other nodes, as in a job.
        (["gpu2"], [4]),
        (["bob@gpu3"], [1]),
        (["gpu3"], [1, 2]),
        (["2", "gpu1"], [0, 2]),
        # A name takes precedence over a number.
        (["7"], [3]),
    ],
)
def test_choose_accepts_names_and_numbers(wanted: list[str], chosen: list[int]) -> None:
    assert [each.index for each in choose_nodes(NODES, wanted)] == chosen


@pytest.mark.parametrize("wanted", ["5", "-1", "gpu", "²"])
def test_choose_refuses_unknown_node(wanted: str) -> None:
    with pytest.raises(UsageError, match=r"no such node(.|\n)*0 to 4"):
        choose_nodes(NODES, [wanted])


def test_in_words_merges_numbers() -> None:
    assert indices_in_words([3]) == "node 3"
    assert indices_in_words([0, 1, 2, 5]) == "nodes 0-2, 5"
