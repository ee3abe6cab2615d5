"""Which device is named when bits differ."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.views.verify import diagnosis, report

GOOD = {"product": [1], "sum": [2]}
OTHER = {"product": [9], "sum": [2]}


def results(*hashes: dict[str, list[int]], kinds: str = "aaaa") -> dict[str, Any]:
    """One rank on each node."""
    return {
        "nodes": [{"index": n, "host": f"h{n}", "ranks": [n]} for n in range(len(hashes))],
        "bits": {
            "kinds": list(kinds[: len(hashes)]),
            "hashes": list(hashes),
            "rounds": [5] * len(hashes),
        },
    }


ODD = "gets other bits than its kind (a), or other bits each time: product"


@pytest.mark.parametrize(
    ("hashes", "kinds", "odd"),
    [
        ([GOOD] * 4, "aaaa", []),
        ([GOOD, GOOD, OTHER], "aaa", [2]),
        ([GOOD, OTHER], "aa", [0, 1]),  # no majority says which one is right
        ([GOOD, OTHER, OTHER, GOOD], "abba", []),
        ([{"product": [1, 3], "sum": [2]}], "a", [0]),
        ([GOOD, {"product": [9, 1], "sum": [2]}], "aa", [1]),
    ],
)
def test_who_is_named(hashes: list[dict[str, list[int]]], kinds: str, odd: list[int]) -> None:
    about = results(*hashes, kinds=kinds)
    found = diagnosis.all_of(about)
    words = [f"the device of rank {rank} on node {rank} (h{rank}) {ODD}" for rank in odd]
    assert [(item.kind, item.text) for item in found] == [("wrong", each) for each in words]
    text = report.to_text(about, found)
    assert ("gave the same bits" in text) == (not odd)
    assert all(f"WRONG: {each}" in text for each in words)


def test_one_alone_of_its_kind_is_compared_with_itself() -> None:
    assert "compared with itself only" in report.to_text(results(GOOD), [])
