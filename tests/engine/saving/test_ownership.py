"""Whose a checkpoint is, and which start of a training saved it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.engine.saving import loading
from orchestrator.engine.saving.in_memory.memory_file import Notes
from orchestrator.engine.saving.in_memory.search import next_attempt
from orchestrator.engine.saving.ownership import later_than
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


def test_states_in_memory_are_numbered_by_the_head_too(attempts: pytest.MonkeyPatch) -> None:
    attempts.setenv("ORCHESTRATOR_ATTEMPT", "3")
    assert next_attempt("").startswith("000003-")
    assert next_attempt("000004-abcd").startswith("000005-")


def test_what_is_on_disk_counts_if_it_was_saved_after_what_is_in_memory(tmp_path: Path) -> None:
    """A node that was away comes back with what an earlier attempt had saved: no step tells."""
    for generation, step in ((1, 200), (2, 140), (2, 160), (3, 20)):
        save(tmp_path, step, progress={"run": {"id": "x", "generation": generation}})
    kept = json.dumps({"run": {"id": "x", "generation": 2}})
    notes = Notes(150, "000002-a", 1, {}, "alone", 1, (), kept)
    look = loading.newer_than(lambda: checkpoint_store.every(tmp_path), notes)
    assert sorted(checkpoint.step for checkpoint in look()) == [20, 160]
