"""Who carries which file to whom, and how many at once."""

from __future__ import annotations

from orchestrator.engine.saving.carry import AT_ONCE, Errand, waves
from orchestrator.engine.saving.parts import errands_of
from orchestrator.records.checkpoint_manifest import FileRecord

FILE = FileRecord(1, "0" * 64)
NODES = [(0, "a"), (0, "a"), (1, "b"), (2, "c")]


def sent(names: list[str], copies: int) -> list[str]:
    errands = errands_of(dict.fromkeys(names, FILE), NODES, copies)
    return [f"{each.name} {each.source}>{each.target}" for each in errands]


def test_each_part_goes_to_the_next_node_and_what_is_alike_to_all() -> None:
    names = [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp"]
    assert sent(names, 1) == []
    ring = ["__0_0.distcp 0>2", "__1_0.distcp 1>2", "__2_0.distcp 2>3", "__3_0.distcp 3>0"]
    assert sent(names, 2) == ring
    assert len(sent(names, 3)) == len(sent(names, 9)) == 8  # no node keeps a file twice
    assert sent(["__0_alike_0.distcp"], 1) == ["__0_alike_0.distcp 0>2", "__0_alike_0.distcp 0>3"]


def test_no_rank_has_more_files_open_than_it_should() -> None:
    errands = [Errand(n % 3, 3 + n % 2, str(n), FILE) for n in range(40)]
    divided = waves(errands)
    assert sorted(tag for wave in divided for tag, _ in wave) == list(range(40))
    for wave in divided:
        for rank in range(5):
            assert len([1 for _, each in wave if each.source == rank]) <= AT_ONCE
            assert len([1 for _, each in wave if each.target == rank]) <= AT_ONCE
    ring = [Errand(n, (n + 1) % 8, str(n), FILE) for n in range(8)]
    assert len(waves(ring)) == 1  # all at the same time
