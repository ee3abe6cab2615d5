"""The tables of tests/gears.py speak of tests that there are, and rows.py runs every row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gears import LONG, SLOW, dealt
from tests.rows import as_one

ROOT = Path(__file__).parents[1]


def test_each_entry_names_tests_that_exist() -> None:
    for entry in [*SLOW, *LONG]:
        path, _, name = entry.partition("::")
        assert (ROOT / path).exists(), entry
        if name:
            text = (ROOT / path).read_text(encoding="utf-8")
            assert f"def {name.partition('[')[0]}" in text, entry


def test_each_test_is_in_the_gear_that_it_belongs_to(request: pytest.FixtureRequest) -> None:
    """This one starts nothing, so it is in the first."""
    assert request.node.get_closest_marker("fast") is not None


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 8, 100_000])
def test_each_worker_ends_with_short_tests(request: pytest.FixtureRequest, workers: int) -> None:
    items = request.session.items
    order = dealt(items, workers)
    assert len(order) == len(items) and set(order) == set(items)
    for worker in range(workers if workers < len(items) else 0):
        part = order[len(items) * worker // workers : len(items) * (worker + 1) // workers][1:-1]
        fast = [item.get_closest_marker("fast") is not None for item in part]
        assert fast == sorted(fast)


# Rows of a table as one test

SEEN: list[tuple[int, str]] = []


@pytest.mark.parametrize(("number", "word"), [(1, "a"), pytest.param(2, "b", id="two")])
@pytest.mark.parametrize("wrong", [(), (1,), (1, 2)], ids=["none", "one", "both"])
def of_rows(number: int, word: str, wrong: tuple[int, ...]) -> None:
    SEEN.append((number, word))
    if number in wrong:
        pytest.fail("it is wrong")


@pytest.mark.parametrize("number", [1])
def of_a_fixture(number: int, tmp_path: Path) -> None: ...


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.skip)])
def of_a_mark(number: int) -> None: ...


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pytest.Module:
    """This module as a worker of a gear collects it."""
    monkeypatch.setattr(request.config, "workerinput", {}, raising=False)
    monkeypatch.setattr(request.config, "args", ["tests"])
    monkeypatch.setattr(request.config.option, "keyword", "")
    found: pytest.Module = request.node.getparent(pytest.Module)
    return found


def test_every_row_runs_and_all_that_fail_are_named(module: pytest.Module) -> None:
    item = as_one(module, "test_of_rows", of_rows)
    assert item is not None and not list(item.iter_markers("parametrize"))
    SEEN.clear()
    with pytest.raises(AssertionError) as failed:
        item.runtest()
    assert SEEN == [(1, "a"), (2, "b")] * 3
    said = str(failed.value)
    assert said.startswith("3 of 6 rows") and said.count("it is wrong") == 3
    assert said.count("'number': 1") == 2 and "{'wrong': (1, 2), 'number': 2, 'word': 'b'}" in said


def test_rows_are_tests_of_their_own_where_somebody_asks_or_more_than_values_is_meant(
    module: pytest.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert as_one(module, "test_of_a_fixture", of_a_fixture) is None
    assert as_one(module, "test_of_a_mark", of_a_mark) is None
    monkeypatch.setattr(module.config, "args", ["tests/test_gears.py::test_of_rows"])
    assert as_one(module, "test_of_rows", of_rows) is None
    monkeypatch.undo()
    if not hasattr(module.config, "workerinput"):
        assert as_one(module, "test_of_rows", of_rows) is None
