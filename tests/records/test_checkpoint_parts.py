"""Checkpoints that are complete on several nodes, and the transfers that they need."""

from dataclasses import replace

import pytest

from orchestrator.records.checkpoint_manifest import FileRecord
from orchestrator.records.checkpoint_parts import (
    CheckpointCandidate,
    Holding,
    list_candidates,
    no_checkpoint_error,
    plan_deliveries,
)

ALL = {name: FileRecord(10, name * 64) for name in "abc"}
HOSTS = {"a": "na", "b": "nb", "c": "nc"}


def holding(
    node: int, here: str, *, step: int = 8, manifest: str = "m", save: str = "s"
) -> Holding:
    return Holding(node, step, save, step + node / 10, manifest, ALL, frozenset(here), HOSTS)


def found(*holdings: Holding) -> CheckpointCandidate:
    return list_candidates(holdings)[0]


def moves(candidate: CheckpointCandidate, **needs: str) -> list[str]:
    wanted = {int(node[1:]): set(names) for node, names in needs.items()}
    return [
        f"{each.name}: {each.source}>{each.target}" for each in plan_deliveries(candidate, wanted)
    ]


def test_candidate_is_whole_if_each_file_is_somewhere() -> None:
    assert found(holding(0, "a"), holding(1, "b"), holding(2, "c")).whole
    short = found(holding(0, "a"), holding(1, "ab"))
    assert not short.whole
    assert short.shortage() == "step 8 lacks c (written by nc)"
    assert "step 8 lacks c (written by nc)" in str(no_checkpoint_error([short]))


def test_files_of_two_saves_are_not_combined() -> None:
    two = list_candidates(
        [holding(0, "ab"), holding(1, "c", save="other"), holding(2, "c", step=4)]
    )
    assert [each.whole for each in two] == [False] * 3
    assert [each.step for each in two] == [8, 8, 4]


def test_moves_fill_gaps_from_least_loaded_node() -> None:
    candidate = found(holding(0, "ab"), holding(1, "bc"), holding(2, ""))
    assert moves(candidate, n0="ab", n1="bc") == []
    assert moves(candidate, n0="abc", n1="bc", n2="ab", n3="b") == [
        "c: 1>0",
        "a: 0>2",
        "b: 0>2",
        "b: 1>3",
    ]


def test_later_saved_candidate_comes_first() -> None:
    """The order does not follow the step, because a training may have gone back."""
    early = holding(1, "abc", step=9)
    late = [replace(holding(node, "abc"), created=20.0) for node in (0, 1)]
    assert [each.step for each in list_candidates([early, *late])] == [8, 9]


@pytest.mark.parametrize("node, expected", [(0, "m"), (1, "n"), (2, "m")])
def test_node_keeps_version_it_wrote(node: int, expected: str) -> None:
    candidate = found(holding(0, "abc"), holding(1, "abc", manifest="n"))
    assert candidate.version_for(node)[0].manifest == expected
