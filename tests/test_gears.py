"""The tables of tests/gears.py speak of tests that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gears import LONG, SLOW, dealt

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
