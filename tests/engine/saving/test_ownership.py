"""Whose a checkpoint is, and which start of a training saved it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.saving import search
from orchestrator.engine.saving.ownership import Run, later_than
from orchestrator.records import checkpoint_store
from tests.records.test_checkpoint_store import save

JOB = "/n/.orchestrator/runs/mine_20261122_101500-ab12cd/3/experiment"


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("ORCHESTRATOR_EXPERIMENT", JOB)
    return monkeypatch


def test_a_later_start_has_a_higher_number_whatever_it_knows(
    attempts: pytest.MonkeyPatch,
) -> None:
    """Its nodes may be other ones, which have nothing of the attempts before."""
    numbers = []
    for attempt in ("1", "2", "3"):
        attempts.setenv("ORCHESTRATOR_ATTEMPT", attempt)
        numbers.append(later_than(0))
    assert numbers == [20261122101500001, 20261122101500002, 20261122101500003]
    assert later_than(numbers[-1]) == numbers[-1] + 1  # a second training of one program
    for place in (JOB.replace("1500-ab", "1501-ab"), "/home/e/mine_20261122_101501"):
        attempts.setenv("ORCHESTRATOR_EXPERIMENT", place)
        attempts.setenv("ORCHESTRATOR_ATTEMPT", "1")
        assert later_than(0) > numbers[-1]
    attempts.delenv("ORCHESTRATOR_EXPERIMENT")
    assert [later_than(0), later_than(7)] == [1, 8]


def test_what_is_on_disk_counts_if_it_was_saved_after_what_is_in_memory(tmp_path: Path) -> None:
    """A node that was away comes back with what an earlier attempt had saved: no step tells."""
    disk, memory = tmp_path / "disk", tmp_path / "memory/trainer1"
    memory.mkdir(parents=True)
    tmp_path.joinpath("memory").chmod(0o700)
    own = {"id": "x", "program": "p", "model": "m"}
    for generation, step in ((1, 200), (2, 140), (2, 160), (3, 20)):
        save(disk, step, progress={"run": {**own, "generation": generation}})
    save(disk, 300, progress={"run": {"id": "other", "generation": 9}})
    save(memory, 150, progress={"run": {**own, "generation": 2}})
    everyone = Ranks(0, 1, 0, torch.device("cpu"), ((0, "a"),))
    found = search.every(
        *(lambda: checkpoint_store.every(disk), memory, Run("x", "p", model="m"), everyone, print),
        disk_alone=True,
    )
    steps = [(each.step, each.in_memory) for each in found.candidates]
    assert steps == [(20, False), (160, False), (150, True), (140, False), (200, False)]
